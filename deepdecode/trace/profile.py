"""A trace, accounted for: per device, per step, per category, per kernel."""

from collections import Counter

import numpy as np

from deepdecode.trace import steps as step_finder
from deepdecode.trace.account import Account, account, grouped, median, union_ns
from deepdecode.trace.categories import COPY, UNKNOWN, Rules, builtin, precision
from deepdecode.trace.model import (
    CATEGORIES,
    KERNEL,
    SCHEMA,
    UNKNOWN_LIMIT,
    Category,
    DeviceProfile,
    Gap,
    Gpu,
    Kernel,
    Profile,
    Slice,
    Step,
    Steps,
    Timeline,
    Trace,
    TraceError,
    Vote,
    Warning,
    plural,
)

MAX_GAPS, MAX_SLICES = 20, 3000
PHASES = ("decode", "prefill", "mixed", "training", "unknown")
KINDS = ("kernel", "memcpy", "memset")

# words of attention kernels that run in one phase only
_DECODES = ("decode", "forgen", "splitkv", "paged_attention", "attention_3d", "stage1", "stage2", "pa_fwd", "mqa_logits_paged")
_PREFILLS = ("prefill", "extend", "context", "varlen", "forcontext", "_ragged")
_TRAINS = ("backward", "_bwd", "bwd_", "dgrad", "wgrad", "fused_adam", "adagrad", "lamb_", "bn_bw")
_TRAIN_RANGES = ("optimizer.", "## backward", "## optimizer", "## zero_grad", "zero_grad", "distributeddataparallel")


def profile(trace: Trace, *, rules: Rules | None = None, phase: str | None = None) -> Profile:
    """Account for every GPU of a trace.

    Args:
        rules: from `load_rules`; the built-in ones by default.
        phase: count only steps of this phase ("decode", "prefill", "mixed"); all by default.

    Raises:
        TraceError: no step has the wanted phase.
    """
    rules = rules or builtin()
    if phase is not None and phase not in PHASES:
        raise TraceError(f"profile: phase must be one of {', '.join(PHASES)}, got {phase!r}")
    warnings: list[Warning] = []
    training = _training(trace)
    found = [_device(trace, i, gpu, rules, phase, training, warnings) for i, gpu in enumerate(trace.gpus)]
    devices = tuple(one for one in found if not isinstance(one, str))
    others = [(_title(gpu), one) for gpu, one in zip(trace.gpus, found, strict=True) if isinstance(one, str)]
    if others and not devices:
        seen = "; ".join(dict.fromkeys(seen for _, seen in others))
        raise TraceError(f"profile: {phase} steps must be in the trace, got {seen}", "leave --phase out")
    warnings += [Warning("OTHER_PHASE", f"{title} is left out: its steps are {seen}") for title, seen in others]
    main = max(range(len(devices)), key=lambda i: devices[i].busy_ns) if devices else None
    steps = devices[main].steps.items if main is not None else ()
    batches = {s.batch for s in steps if s.batch is not None}
    verdict, votes = _phase(trace, devices[main] if main is not None else None, training)
    if main is not None:
        _warn_device(devices, main, warnings)
    _warn_trace(trace, verdict, warnings)
    return Profile(
        schema=SCHEMA,
        sources=trace.sources,
        gpus=tuple(dict.fromkeys(g.name for g in trace.gpus if g.name)),
        devices=devices,
        main=main,
        phase=verdict,
        phase_votes=votes,
        batch=batches.pop() if len(batches) == 1 else None,
        health=trace.health,
        warnings=tuple({(w.code, w.text): w for w in warnings}.values()),
        rules=rules.label,
        notes=trace.notes,
    )


def _device(
    trace: Trace, index: int, gpu: Gpu, rules: Rules, phase: str | None, training: bool, warnings: list[Warning]
) -> DeviceProfile | str:
    """One GPU's timeline, or the phases that it has where the wanted one is not among them."""
    table = trace.table
    rows = np.flatnonzero(table.gpu == index)  # in order of start
    start, dur = table.start_ns[rows], table.dur_ns[rows]
    end = start + dur
    is_kernel = table.kind[rows] == KERNEL

    # rows of one name and kind form a group; group -> name, rule, category
    keys, group = np.unique(table.name[rows].astype(np.int64) * 3 + table.kind[rows], return_inverse=True)
    group = group.reshape(-1).astype(np.int32)
    names = [trace.names[k // 3] for k in keys.tolist()]
    placed = [rules.classify(n) if k % 3 == KERNEL else COPY for k, n in zip(keys.tolist(), names, strict=True)]
    order = list(CATEGORIES)
    category_of = np.array([order.index(r.category) for r in placed], np.int32)  # [groups]
    category = category_of[group]

    launch = step_finder.launch_of(trace, rows)
    found = step_finder.find(trace, rows, launch, category == order.index("sampling"))
    for note in found.notes:
        warnings.append(Warning("STEP_TRIMMED", note))
    phases = found.phase if not training else ["training" if p == "unknown" else p for p in found.phase]
    keep = [i for i, p in enumerate(phases) if phase is None or p == phase]
    if not keep:
        return _listed(phases)
    border = found.border[keep]
    try:
        sums = account(start, end, border)
    except ValueError:
        border = np.array([[border[0, 0], border[-1, 1]]])
        keep = keep[:1]
        sums = account(start, end, border)
        warnings.append(
            Warning("STEPS_MERGED", "activities span too many steps to be cut at each: they are counted as one step")
        )
    n_steps, n_groups, n_categories = len(border), len(keys), len(order)

    # an activity counts for the step it starts in, and its time for the steps it runs in
    home = np.searchsorted(border[:, 0], start, "right") - 1
    home = np.where((home >= 0) & (start < border[home, 1]), home, -1)
    inside = home >= 0
    exclusive = _sums(group[sums.row], sums.exclusive_ns, n_groups)
    by_step = _sums(sums.step.astype(np.int64) * n_categories + category[sums.row], sums.exclusive_ns, n_steps * n_categories)
    by_step = by_step.reshape(n_steps, n_categories)
    window_count = np.bincount(group[inside], minlength=n_groups)
    window_sum = _sums(group[inside], dur[inside], n_groups)

    graph = (launch >= 0) & trace.launches.is_graph[launch] if len(trace.launches) else np.zeros(len(rows), bool)
    _, first_of_launch = np.unique(launch[graph], return_index=True)
    launched_in = home[np.flatnonzero(graph)[first_of_launch]]
    graph_launches = np.bincount(launched_in[launched_in >= 0], minlength=n_steps)
    kernels = np.bincount(home[inside & is_kernel], minlength=n_steps)
    wall = border[:, 1] - border[:, 0]
    steps = Steps(
        count=n_steps,
        signal=found.signal,
        votes=found.votes,
        agreement=found.agreement,
        items=tuple(
            Step(begin, length, busy, count, replays, phases[i], found.batch[i])
            for i, begin, length, busy, count, replays in zip(
                keep,
                border[:, 0].tolist(),
                wall.tolist(),
                sums.busy_ns.tolist(),
                kernels.tolist(),
                graph_launches.tolist(),
                strict=True,
            )
        ),
        p50_ns=median(wall),
        min_ns=int(wall.min()),
        max_ns=int(wall.max()),
        p50_busy_ns=median(sums.busy_ns),
        p50_idle_ns=median(wall - sums.busy_ns),
    )

    busy = int(sums.busy_ns.sum())
    totals = by_step.sum(axis=0)
    known = (launch >= 0) & is_kernel
    graph_share = float((graph & is_kernel).sum() / known.sum()) if known.any() else 0.0
    per_step_graphs = float(np.median(graph_launches))
    per_step = _medians(group[sums.row], sums.step, sums.exclusive_ns, n_groups, n_steps)
    kernel_rows = _kernel_rows(
        table, rows, group, names, placed, keys, exclusive, per_step, window_count, window_sum, n_steps, dur
    )
    device = DeviceProfile(
        device=gpu.device,
        process=gpu.process,
        rank=gpu.rank,
        gpu=gpu.name,
        sms=gpu.sms,
        kernels=int(is_kernel.sum()),
        copies=int((~is_kernel).sum()),
        sum_ns=int(dur[is_kernel].sum()),
        union_ns=union_ns(start, end),
        span_ns=int(end.max() - start[0]),
        window_ns=int(wall.sum()),
        busy_ns=busy,
        idle_ns=int(wall.sum()) - busy,
        exclusive_ns=dict(zip(order, totals.tolist(), strict=True)),
        steps=steps,
        kernels_per_step=float(np.median(kernels)),
        graph_launches_per_step=per_step_graphs,
        graph_kernel_share=graph_share,
        graph_mode=_graph_mode(known.any(), graph_share, per_step_graphs),
        categories=_categories(order, by_step, category, inside, dur, n_steps, busy),
        kernel_rows=kernel_rows,
        gaps=_gaps(sums, group, names),
        gap_count=len(sums.gap_ns),
        unknown_share=float(totals[order.index("unknown")] / busy) if busy else 0.0,
        timeline=_timeline(sums, border, wall, table, rows, group, names, placed, start, dur),
    )
    if sum(device.exclusive_ns.values()) + device.idle_ns != device.window_ns:
        raise AssertionError("exclusive and idle time do not add up to the window")
    return device


def _sums(group: np.ndarray, values: np.ndarray, groups: int) -> np.ndarray:
    out = np.zeros(groups, np.int64)
    np.add.at(out, group, values)
    return out


def _medians(group: np.ndarray, step: np.ndarray, values: np.ndarray, groups: int, steps: int) -> np.ndarray:
    """[groups] lower median over all steps of a group's sum in each; a step without the group counts as 0."""
    cells, index = np.unique(group.astype(np.int64) * steps + step, return_inverse=True)
    totals = _sums(index.reshape(-1), values, len(cells))
    of = cells // steps
    totals = totals[np.lexsort((totals, of))]
    count = np.bincount(of, minlength=groups)
    at = (steps - 1) // 2 - (steps - count)  # among the steps that have it, the others being smaller
    begin = np.cumsum(count) - count
    return np.where(at >= 0, totals[np.minimum(begin + at, max(0, len(totals) - 1))] if len(totals) else 0, 0)


def _graph_mode(known: bool, share: float, per_step: float) -> str:
    if not known:
        return "unknown"
    if share < 0.5:
        return "eager"
    return "full" if per_step <= 2 else "piecewise"


def _kernel_rows(
    table, rows, group, names, placed, keys, exclusive, per_step, window_count, window_sum, n_steps, dur
) -> tuple[Kernel, ...]:
    n = len(keys)
    count = np.bincount(group, minlength=n)
    total = _sums(group, dur, n)
    p50, least, most = grouped(dur, group, n)
    blocks, _, _ = grouped(table.blocks[rows], group, n)
    out = [
        Kernel(
            name=names[i],
            category=placed[i].category,
            rule=str(placed[i]),
            precision=precision(names[i]) if placed[i] is not COPY else None,
            kind=KINDS[keys[i] % 3],
            count=int(count[i]),
            sum_ns=int(total[i]),
            window_count=int(window_count[i]),
            window_sum_ns=int(window_sum[i]),
            exclusive_ns=int(exclusive[i]),
            launches_per_step=float(window_count[i] / n_steps),
            exclusive_per_step_ns=float(exclusive[i] / n_steps),
            p50_step_ns=int(per_step[i]),
            p50_ns=int(p50[i]),
            min_ns=int(least[i]),
            max_ns=int(most[i]),
            blocks_p50=int(blocks[i]) or None,
        )
        for i in range(n)
    ]
    return tuple(sorted(out, key=lambda k: (-k.exclusive_ns, -k.sum_ns, k.name)))


def _categories(order, by_step, category, inside, dur, n_steps, busy) -> tuple[Category, ...]:
    count = np.bincount(category[inside], minlength=len(order))
    total = _sums(category[inside], dur[inside], len(order))
    out = [
        Category(
            category=name,
            count=int(count[i]),
            sum_ns=int(total[i]),
            exclusive_ns=int(by_step[:, i].sum()),
            share=float(by_step[:, i].sum() / busy) if busy else 0.0,
            launches_per_step=float(count[i] / n_steps),
            step_ns=tuple(by_step[:, i].tolist()),
            p50_step_ns=median(by_step[:, i]),
        )
        for i, name in enumerate(order)
        if count[i] or by_step[:, i].any()
    ]
    return tuple(sorted(out, key=lambda c: -c.exclusive_ns))


def _gaps(sums: Account, group, names) -> tuple[Gap, ...]:
    longest = np.argsort(-sums.gap_ns, kind="stable")[:MAX_GAPS]

    def name(row: int) -> str:
        return names[group[row]] if row >= 0 else ""

    columns = (sums.gap_start, sums.gap_ns, sums.gap_before, sums.gap_after)
    found = zip(*(column[longest].tolist() for column in columns), strict=True)
    return tuple(Gap(start, length, name(before), name(after)) for start, length, before, after in found)


def _timeline(sums: Account, border, wall, table, rows, group, names, placed, start, dur) -> Timeline | None:
    step = int(np.flatnonzero(wall == median(wall))[0])
    mine = np.unique(sums.row[sums.step == step])
    if not len(mine):
        return None
    shown = np.sort(mine[np.argsort(-dur[mine], kind="stable")[:MAX_SLICES]])
    used, name = np.unique(group[shown], return_inverse=True)
    zero = int(border[step, 0])
    slices = zip(
        table.stream[rows[shown]].tolist(), (start[shown] - zero).tolist(), dur[shown].tolist(), name.tolist(), strict=True
    )
    return Timeline(
        step=step,
        wall_ns=int(wall[step]),
        names=tuple(names[i] for i in used.tolist()),
        categories=tuple(placed[i].category for i in used.tolist()),
        slices=tuple(Slice(*values) for values in slices),
        left_out=len(mine) - len(shown),
    )


def _training(trace: Trace) -> bool:
    """Backward kernels, or ranges of an optimiser: no inference has them."""
    ranges = sum(a.name.lower().startswith(_TRAIN_RANGES) for a in trace.annotations)
    kernels = sum(any(w in n[:400].lower() for w in _TRAINS) for n in trace.names)
    return ranges >= 2 or kernels >= 4


def _phase(trace: Trace, device: DeviceProfile | None, training: bool) -> tuple[str, tuple[Vote, ...]]:
    capture = trace.health.capture
    if device is None or capture in ("cpu-only", "graph-capture"):
        verdict = {"cpu-only": "cpu-only", "graph-capture": "capture"}.get(capture, "unknown")
        return verdict, (Vote("capture kind", verdict, f"the file is {capture}"),)
    said = Counter(s.phase for s in device.steps.items if s.phase not in ("unknown", "training"))
    stated = next(iter(said)) if len(said) == 1 else "mixed" if said else None
    counts = ", ".join(f"{n} {p}" for p, n in said.most_common())
    words = {"decode": 0, "prefill": 0}
    for k in device.kernel_rows:
        if k.category in ("attention", "indexer"):
            name = k.name.lower()
            for phase, parts in (("prefill", _PREFILLS), ("decode", _DECODES)):
                if any(p in name for p in parts):
                    words[phase] += k.window_count
                    break
    kernels = max(words, key=lambda p: words[p]) if any(words.values()) else None
    graphs = "decode" if device.graph_mode in ("full", "piecewise") and not training else None
    votes = (
        Vote("range names", stated, counts),
        Vote("training ranges or kernels", "training" if training else None),
        Vote("attention kernels", kernels, ", ".join(f"{n} {p}" for p, n in words.items() if n)),
        Vote("graph launches", graphs, "engines replay graphs when they decode" if graphs else ""),
    )
    if stated:
        return stated, votes
    if training:
        return "training", votes
    rest = {v for v in (kernels, graphs) if v}
    return (rest.pop() if len(rest) == 1 else "unknown"), votes


def _listed(phases: list[str]) -> str:
    return ", ".join(f"{n} {p}" for p, n in Counter(phases).most_common()) or "none"


def _warn_device(devices: tuple[DeviceProfile, ...], main: int, warnings: list[Warning]) -> None:
    device = devices[main]
    steps = device.steps

    def warn(code: str, text: str) -> None:
        warnings.append(Warning(code, text))

    if device.unknown_share > UNKNOWN_LIMIT:
        top = next((k.name for k in device.kernel_rows if k.category == UNKNOWN.category), "")
        warn(
            "UNKNOWN_SHARE",
            f"{device.unknown_share:.1%} of busy time is in kernels no rule knows, above {UNKNOWN_LIMIT:.0%}"
            f" (largest: {top[:80]}): add rules with --rules",
        )
    if steps.agreement == 0:
        warn("NO_STEPS", "no signal tells steps apart: the whole capture is counted as one step")
    elif against := [v for v in steps.votes if v.note == "disagrees" and v.signal not in step_finder.SUPPORT]:
        against = ", ".join(f"{v.signal} {v.value}" for v in against)
        warn("STEPS_DISAGREE", f"{steps.signal} says {steps.count} steps, but {against}")
    if steps.count < 3 and not steps.whole:
        warn("FEW_STEPS", f"{steps.count} step{'s' * (steps.count > 1)}: the spread between steps is not known")
    if device.sum_ns > 1.02 * device.union_ns:
        warn(
            "OVERLAP",
            f"kernels overlap: their sum is {device.sum_ns / 1e6:.3f} ms, the time with any running"
            f" {device.union_ns / 1e6:.3f} ms; shares are of the latter",
        )
    if len(devices) > 1:
        warn("MANY_DEVICES", f"{len(devices)} devices worked; figures are of the busiest, {_title(device)}")


def _warn_trace(trace: Trace, verdict: str, warnings: list[Warning]) -> None:
    health = trace.health
    if len(names := dict.fromkeys(gpu.name for gpu in trace.gpus if gpu.name)) > 1:
        listed = ", ".join(name[:80] for name in list(names)[:4]) + (", ..." if len(names) > 4 else "")
        taken = "they are taken for ranks of one run" if len(trace.sources) > 1 else "figures are of the busiest alone"
        warnings.append(Warning("MIXED_GPUS", f"the GPUs differ ({listed}): {taken}"))
    texts = {
        "cpu-only": ("NO_GPU", "the file holds no GPU activity: nothing can be said about GPU time"),
        "graph-capture": ("GRAPH_CAPTURE", "this is the capture of a graph, not its replay: launches were recorded, not run"),
        "graph-summary": ("GRAPH_SUMMARY", "CUDA graphs were recorded without their kernels: times of kernels are missing"),
        "gpu-only": ("GPU_ONLY", "no launches were recorded: steps and graphs are judged from kernels alone"),
    }
    if health.capture in texts:
        warnings.append(Warning(*texts[health.capture]))
    phases = {
        "prefill": ("PREFILL", "this is prefill, not decode"),
        "mixed": ("MIXED", "steps of several phases are counted together: choose one with --phase"),
        "training": ("TRAINING", "this is training, not inference"),
    }
    if verdict in phases:
        warnings.append(Warning(*phases[verdict]))
    if health.bad_events:
        read = f"{health.events} were read, {health.recovered} of them out of damaged blocks"
        skipped = "1 damaged event was" if health.bad_events == 1 else f"{health.bad_events} damaged events were"
        text = f"{skipped} skipped; {read}"
        warnings.append(Warning("DAMAGED", text))
    if health.truncated:
        warnings.append(Warning("TRUNCATED", "the file ends early: the last step may be cut"))
    if health.impossible_durations:
        text = "had impossible times: dropped, or cut to the start of the next"
        warnings.append(Warning("IMPOSSIBLE", f"{plural(health.impossible_durations, 'activity', 'activities')} {text}"))
    if health.orphans and health.capture == "gpu":
        warnings.append(Warning("ORPHANS", f"{plural(health.orphans, 'kernel')} without a launch in the file"))
    if health.drops:
        warnings.append(Warning("DROPS", f"the profiler says it dropped {plural(health.drops, 'record')}"))


def _title(device: DeviceProfile | Gpu) -> str:
    rank = f" of rank {device.rank}" if device.rank is not None else ""
    return f"device {device.device}{rank}"
