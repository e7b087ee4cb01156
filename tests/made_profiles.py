"""Profiles built in memory, for tests of what reads profiles: exact times, and steps that vary by a known amount."""

import hashlib

from deepdecode.trace.model import (
    CATEGORIES,
    SCHEMA,
    Category,
    DeviceProfile,
    Gap,
    Health,
    Kernel,
    Profile,
    Slice,
    Source,
    Step,
    Steps,
    Timeline,
    Vote,
)

MS = 1_000_000


def kernel(name, category, ms, launches=43, blocks=None, precision=None, steps=8):
    ns = round(ms * MS)
    one = round(ns / max(1, launches))
    total = ns * steps
    count = round(launches * steps)
    return Kernel(
        name=name,
        category=category,
        rule="test",
        precision=precision,
        kind="kernel",
        count=count,
        sum_ns=total,
        window_count=count,
        window_sum_ns=total,
        exclusive_ns=total,
        launches_per_step=launches,
        exclusive_per_step_ns=float(ns),
        p50_step_ns=round(ns),
        p50_ns=one,
        min_ns=one,
        max_ns=one,
        blocks_p50=blocks,
    )


def profile(
    kernels,
    *,
    idle=1.0,
    steps=8,
    jitter=0.002,
    name="a",
    gpu="NVIDIA H200",
    sms=132,
    gpus=1,
    batch=16,
    phase="decode",
    graph_mode="full",
    signal="graph launches",
    agreement=1.0,
    capture="gpu",
    fmt="kineto",
    health=None,
    warnings=(),
):
    """A profile of `steps` steps whose wall time is the kernels' plus `idle` ms.

    `kernels` is a list of (name, category, ms per step, and options of `kernel`). Steps run from 1 - jitter to 1 + jitter
    of that, evenly, in their kernels and their gaps alike.
    """
    rows = [kernel(*k[:3], **(k[3] if len(k) > 3 else {}), steps=steps) for k in kernels]
    rows.sort(key=lambda row: -row.exclusive_ns)
    scale = [1 + jitter * (2 * i / max(1, steps - 1) - 1) if steps > 1 else 1.0 for i in range(steps)]
    busy = sum(row.exclusive_per_step_ns for row in rows)
    wall = busy + idle * MS
    cats = []
    for key in CATEGORIES:
        mine = [row for row in rows if row.category == key]
        ns = sum(row.exclusive_per_step_ns for row in mine)
        if mine:
            launches = sum(row.launches_per_step for row in mine)
            per_step = tuple(round(ns * s) for s in scale)
            cats.append(
                Category(
                    key, round(launches * steps), round(ns * steps), round(ns * steps), ns / busy, launches, per_step, round(ns)
                )
            )
    cats.sort(key=lambda cat: -cat.exclusive_ns)
    launches = sum(row.launches_per_step for row in rows)
    items = tuple(
        Step(round(i * wall), round(wall * s), round(busy * s), round(launches), int(graph_mode == "full"), phase, batch)
        for i, s in enumerate(scale)
    )
    walls = [step.wall_ns for step in items]
    names = tuple(row.name for row in rows)
    slices, at = [], 0
    for i, row in enumerate(rows):
        for _ in range(min(50, round(row.launches_per_step))):
            slices.append(Slice(7, at, row.p50_ns, i))
            at += row.p50_ns
    device = DeviceProfile(
        device=0,
        process=0,
        rank=None,
        gpu=gpu,
        sms=sms,
        kernels=round(launches * steps),
        copies=0,
        sum_ns=round(busy * steps),
        union_ns=round(busy * steps),
        span_ns=round(wall * steps),
        window_ns=round(wall * steps),
        busy_ns=round(busy * steps),
        idle_ns=round(wall * steps) - round(busy * steps),
        exclusive_ns={key: sum(row.exclusive_ns for row in rows if row.category == key) for key in CATEGORIES},
        steps=Steps(
            steps,
            signal,
            (Vote(signal, steps, "seen"),),
            agreement,
            items,
            round(wall),
            min(walls),
            max(walls),
            round(busy),
            round(wall - busy),
        ),
        kernels_per_step=launches,
        graph_launches_per_step=float(graph_mode == "full"),
        graph_kernel_share=float(graph_mode == "full"),
        graph_mode=graph_mode,
        categories=tuple(cats),
        kernel_rows=tuple(rows),
        gaps=(Gap(0, round(idle * MS / 2), names[0], names[-1]),),
        gap_count=2,
        unknown_share=sum(row.exclusive_ns for row in rows if row.category == "unknown") / max(1, round(busy * steps)),
        timeline=Timeline(steps // 2, round(wall), names, tuple(row.category for row in rows), tuple(slices)),
    )
    return Profile(
        schema=SCHEMA,
        sources=(Source(f"/data/{name}.json.gz", hashlib.sha256(name.encode()).hexdigest(), fmt, 1234),),
        gpus=(gpu,) if gpu else (),
        devices=(device,) * gpus,
        main=0,
        phase=phase,
        phase_votes=(Vote("annotations", phase, "step[DECODE bs=16]"),),
        batch=batch,
        health=health or Health(events=1000, capture=capture),
        warnings=tuple(warnings),
    )
