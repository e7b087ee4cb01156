"""Trace files in three formats, written from one list of kernels, for tests of the commands."""

import gzip
import json
import sqlite3

from made_profiles import MS

STEP = [
    ("sparse_attn_decode_mma_kernel", 400_000),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 500_000),
    ("void at::native::vectorized_elementwise_kernel<4>(int)", 50_000),
    ("void at::native::vectorized_elementwise_kernel<4>(int)", 50_000),
    ("topk_topp_sampling_kernel", 10_000),
]


def schedule(kernels=STEP, steps=9, gap=1_000, between=200_000, jitter=0.002):
    """(step, name, start, duration) of every kernel, in ns; step i runs 1 + jitter * (i % 3 - 1) times as long."""
    at = 5 * MS
    for step in range(steps):
        scale = 1 + jitter * (step % 3 - 1)
        for name, dur in kernels:
            yield step, name, round(at), round(dur * scale)
            at += (dur + gap) * scale
        at += between * scale


def kineto(path, rows=None, *, gpu="NVIDIA H200", bs=16, phase="DECODE", graph=True, blocks=264, extra=()):
    """A PyTorch trace: one graph launch a step, or a launch a kernel."""
    rows = list(schedule() if rows is None else rows)
    events = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}]
    correlation, last = 0, -1
    for step, name, start, dur in rows:
        new = step != last
        last = step
        if new or not graph:
            correlation += 1
            call = "cudaGraphLaunch" if graph else "cudaLaunchKernel"
            args = {"correlation": correlation}
            events.append(
                {
                    "ph": "X",
                    "cat": "cuda_runtime",
                    "name": call,
                    "pid": 9,
                    "tid": 9,
                    "ts": start / 1e3 - 20,
                    "dur": 5,
                    "args": args,
                }
            )
        if new and bs is not None:
            whole = [r for r in rows if r[0] == step]
            end = whole[-1][2] + whole[-1][3]
            mark = {"ph": "X", "cat": "user_annotation", "name": f"step[{phase} bs={bs}]", "pid": 9, "tid": 9}
            events.append({**mark, "ts": start / 1e3 - 30, "dur": (end - start) / 1e3})
        args = {"device": 0, "stream": 7, "correlation": correlation, "grid": [blocks, 1, 1], "block": [128, 1, 1]}
        if graph:
            args["graph node id"] = 1
        events.append(
            {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start / 1e3, "dur": dur / 1e3, "args": args}
        )
    document = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": gpu, "numSms": 132}] if gpu else [],
        "traceEvents": events + list(extra),
    }
    text = json.dumps(document, indent=1)
    if str(path).endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text)
    return path


def nsys(path, rows=None):
    """An Nsight Systems export with the tables that matter."""
    rows = list(schedule() if rows is None else rows)
    names = {name: i + 1 for i, name in enumerate(dict.fromkeys(row[1] for row in rows))}
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, name) for name, i in names.items()])
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,"
            " correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, gridX INTEGER, gridY INTEGER, gridZ INTEGER)"
        )
        db.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 7, ?, 16777216, ?, 264, 1, 1)",
            [(start, start + dur, i, names[name]) for i, (_, name, start, dur) in enumerate(rows)],
        )
    db.close()
    return path


def nsys_csv(path, rows=None):
    """What `nsys stats --report cuda_gpu_trace --format csv` writes."""
    lines = ["Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Device,Ctx,Strm,Name"]
    for i, (_, name, start, dur) in enumerate(schedule() if rows is None else rows):
        lines.append(f'{start},{dur},{i},264,1,1,128,1,1,"NVIDIA H200 (0)",1,7,"{name}"')
    path.write_text("\n".join(lines) + "\n")
    return path


def slower(kernels=STEP, **times):
    """The step with the durations of kernels whose name has the word changed, in ns."""
    return [(name, next((ns for word, ns in times.items() if word in name), dur)) for name, dur in kernels]
