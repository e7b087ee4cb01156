"""Generate profiler traces of a DeepSeek-V4-Flash decode step, the same bytes every time.

    python tools/make_traces.py tests/data              # the three rungs, small, as Kineto .json.gz
    python tools/make_traces.py --big 200 /tmp/big.json # a Kineto trace of 200 MB for benchmarks

The times are made up so that the categories' shares are those that the first campaign reported for its rungs:
attention 57.1 % with the fallback, 17.6 % with tensor cores, 9.6 % with its keys split as well.
"""

import argparse
import csv
import gzip
import io
import json
import random
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LAYERS = 43
BATCH = 16
QUANTUM_NS = 32  # CUPTI reports durations in these steps
GAP_NS = 960  # between the kernels of a replayed graph
BASE_NS = 1_775_078_550_000_000_000
FIRST_NS = 7_721_328_752_560_214
GPU = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
SMS = 188
STREAM = 7


@dataclass(frozen=True)
class Row:
    """One GPU activity; `step` counts from 0, `kind` is "kernel", "memcpy" or "memset"."""

    name: str
    kind: str
    start_ns: int
    dur_ns: int
    grid: tuple[int, int, int]
    step: int
    correlation: int
    in_graph: bool


ELEMENTWISE = "void at::native::{}<{}, at::native::{}>(int, at::native::{}, std::array<char*, {}ul>)"
GLUE = (
    ELEMENTWISE.format(
        "vectorized_elementwise_kernel", 4, "CUDAFunctor_add<c10::BFloat16>", "CUDAFunctor_add<c10::BFloat16>", 3
    ),
    ELEMENTWISE.format("vectorized_elementwise_kernel", 4, "MulFunctor<float>", "MulFunctor<float>", 3),
    ELEMENTWISE.format("unrolled_elementwise_kernel", 4, "direct_copy_kernel_cuda", "direct_copy_kernel_cuda", 2),
    ELEMENTWISE.format("elementwise_kernel", 128, "direct_copy_kernel_cuda", "direct_copy_kernel_cuda", 2),
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>(float)",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 3, 64, 64>(int)",
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
    "triton_poi_fused_mul_sigmoid_0",
)
SIMT = (
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_tn_align1>(cutlass_80_simt_sgemm_128x32_8x5_tn_align1::Params)",
    "ampere_sgemm_32x32_sliced1x4_tn",
)
ATTENTION = {
    "original": (("sparse_attn_per_head_kernel", (BATCH, 64, 1), 1.0),),
    "mma": (("sparse_attn_mma_kernel", (BATCH, 2, 1), 1.0),),
    "splitk": (("sparse_attn_split_kernel", (BATCH, 2, 11), 0.86), ("sparse_attn_merge_kernel", (BATCH, 16, 1), 0.14)),
}
# milliseconds a step, and launches a layer
RUNGS: dict[str, dict[str, tuple[float, int]]] = {
    "original": {"attention": (203.85, 1), "simt": (31.42, 3), "glue": (99.96, 112), "moe": (6.78, 4), "rest": (14.99, 12)},
    "mma": {"attention": (26.56, 1), "simt": (31.42, 3), "glue": (74.30, 112), "moe": (5.24, 4), "rest": (13.38, 12)},
    "splitk": {"attention": (15.72, 2), "simt": (31.44, 3), "glue": (98.25, 116), "moe": (5.24, 4), "rest": (13.10, 12)},
}
MOE = (
    ("moe_fp4_gate_up_kernel", (512, 1, 1), 0.55),
    ("moe_fp4_down_kernel", (256, 1, 1), 0.35),
    ("moe_gate_kernel", (BATCH, 1, 1), 0.05),
    ("moe_combine_kernel", (BATCH, 8, 1), 0.05),
)
REST = (
    ("fp8_gemm_block_kernel", (64, 1, 1), 0.22),
    ("fp8_gemm_block_kernel", (128, 1, 1), 0.20),
    ("rms_norm_kernel", (BATCH, 1, 1), 0.06),
    ("rms_norm_kernel", (BATCH, 1, 1), 0.06),
    ("per_token_cast_fp8_kernel", (BATCH, 8, 1), 0.06),
    ("kv_cache_store_kernel", (BATCH, 1, 1), 0.04),
    ("hc_split_sinkhorn_kernel", (BATCH, 1, 1), 0.07),
    ("compressor_pool_kernel", (BATCH, 4, 1), 0.05),
    ("void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(float)", (BATCH, 1, 1), 0.09),
    ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>(sglang::RankData*)", (36, 1, 1), 0.075),
    ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>(sglang::RankData*)", (36, 1, 1), 0.075),
)
ARGMAX = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, long, 4>>"


def _layer(rung: str, thin: int) -> list[tuple[str, tuple[int, int, int], float]]:
    """The launches of one layer: name, grid, nanoseconds."""
    budget = {part: 1e6 * ms / LAYERS for part, (ms, _) in RUNGS[rung].items()}
    out = [(name, grid, share * budget["attention"]) for name, grid, share in ATTENTION[rung]]
    simt = RUNGS[rung]["simt"][1]
    out += [(SIMT[i % 2], (16, 4, 1), budget["simt"] / simt) for i in range(simt)]
    out += [(name, grid, share * budget["moe"]) for name, grid, share in MOE]
    out += [(name, grid, share * budget["rest"]) for name, grid, share in REST]
    glue = RUNGS[rung]["glue"][1] // thin
    for i in range(glue):
        out.insert(1 + i * 8 // 5 % len(out), (GLUE[i % len(GLUE)], (BATCH * 4, 1, 1), budget["glue"] / glue))
    return out


def rows(rung: str, steps: int, *, layers: int = LAYERS, seed: int = 0, slow: float = 1.0, thin: int = 1) -> Iterator[Row]:
    """All activities in order of start; one graph launch a step.

    `slow` scales every duration; `thin` glue launches become one of their total time, which keeps files small.
    """
    rng = random.Random(f"{rung} {seed}")
    layer = _layer(rung, thin)
    now, correlation = FIRST_NS + 1_000_000, 1000

    def take(name: str, kind: str, dur: float, grid: tuple[int, int, int], step: int, in_graph: bool) -> Row:
        nonlocal now
        dur_ns = max(1, round(dur / QUANTUM_NS)) * QUANTUM_NS
        row = Row(name, kind, now, dur_ns, grid, step, correlation, in_graph)
        now += dur_ns + GAP_NS
        return row

    for step in range(steps):
        pace = slow * (1 + 0.004 * rng.uniform(-1, 1))
        correlation += 1
        yield take("Memcpy HtoD (Pinned -> Device)", "memcpy", 1500, (0, 0, 0), step, False)
        correlation += 1
        for _ in range(layers):
            for name, grid, dur in layer:
                # small kernels of a replayed graph repeat to the tick, which also keeps the files small
                jitter = 0.02 * rng.uniform(-1, 1) if dur > 100_000 else 0
                yield take(name, "kernel", dur * pace * (1 + jitter), grid, step, True)
        correlation += 1
        yield take(ARGMAX, "kernel", 21_000 * pace, (BATCH, 1, 1), step, False)
        correlation += 1
        yield take("Memcpy DtoH (Device -> Pinned)", "memcpy", 1800, (0, 0, 0), step, False)
        now += 400_000 + rng.randrange(20_000)


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def _event(cat: str, name: str, pid: int, tid: int, ts: int, dur: int, args: str) -> str:
    return (
        f'  {{\n    "ph": "X", "cat": "{cat}", "name": {json.dumps(name)}, "pid": {pid}, "tid": {tid},\n'
        f'    "ts": {_us(ts)}, "dur": {_us(dur)},\n    "args": {{\n      {args}\n    }}\n  }}'
    )


def _gpu_event(r: Row) -> str:
    args = (
        f'"External id": {r.correlation}, "device": 0, "context": 1,\n      "stream": {STREAM}, "correlation": {r.correlation}'
    )
    if r.kind == "kernel":
        args += f',\n      "registers per thread": 40, "shared memory": 0, "grid": {list(r.grid)}, "block": [256, 1, 1]'
    else:
        args += ',\n      "bytes": 64, "memory bandwidth (GB/s)": 0.04'
    cat = {"kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}[r.kind]
    return _event(cat, r.name, 0, STREAM, r.start_ns, r.dur_ns, args)


def kineto_events(of: Iterator[Row], *, python: int = 0) -> Iterator[str]:
    """Kineto events of the rows, with their launches, annotations and `python` frames for each kernel."""
    pid, last, seen = 4242, -1, set()
    frame = 0
    for r in of:
        if r.step != last:
            begin, last = r.start_ns - 300_000, r.step
            name = f"step[DECODE bs={BATCH}]"
            yield _event("user_annotation", name, pid, pid, begin, 250_000, f'"External id": {r.correlation}')
            call = begin
        if r.correlation not in seen:
            seen.add(r.correlation)
            call += 8_000
            name = "cudaGraphLaunch" if r.in_graph else "cudaMemcpyAsync" if r.kind == "memcpy" else "cudaLaunchKernel"
            args = f'"External id": {r.correlation}, "cbid": 211, "correlation": {r.correlation}'
            yield _event("cuda_runtime", name, pid, pid, call, 6_000, args)
        yield _gpu_event(r)
        for _ in range(python):
            frame += 1
            args = f'"Python parent id": {frame - 1}, "Python id": {frame}, "Ev Idx": {frame}'
            path = f"engine/layers/attention.py({frame % 997}): forward"
            yield _event("python_function", path, pid, pid, r.start_ns - 200_000, 1_500, args)


HEAD = {
    "schemaVersion": 1,
    "deviceProperties": [
        {"id": 0, "name": GPU, "totalGlobalMem": 102641958912, "computeMajor": 12, "computeMinor": 0, "numSms": SMS}
    ],
    "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
    "displayTimeUnit": "ms",
    "baseTimeNanoseconds": BASE_NS,
}


def write_kineto(path: Path, rung: str, steps: int, **made) -> None:
    """One rung as a Kineto trace (`made` goes to `rows`); gzipped, without a time stamp, where the name ends in .gz."""
    text = json.dumps(HEAD, indent=1)[:-2] + ',\n "traceEvents": [\n'
    text += ",\n".join(kineto_events(rows(rung, steps, **made)))
    text += f'\n ],\n "traceName": "{rung}.json"\n}}\n'
    if path.suffix == ".gz":
        with open(path, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as out:
            out.write(text.encode())
    else:
        path.write_text(text)


def write_big(path: Path, megabytes: int) -> int:
    """A Kineto trace of this size, two Python frames to a kernel; returns its number of events."""
    size, events = 0, 0
    with open(path, "w") as out:
        out.write(json.dumps(HEAD, indent=1)[:-2] + ',\n "traceEvents": [\n')
        for event in kineto_events(rows("splitk", 1_000_000), python=2):
            out.write(event if not events else ",\n" + event)
            size += len(event) + 2
            events += 1
            if size >= megabytes * 1_000_000:
                break
        out.write('\n ],\n "traceName": "big.json"\n}\n')
    return events


def write_nsys(path: Path, rung: str, steps: int, **made) -> None:
    """One rung as an Nsight Systems export (schema 3.x: the tables and columns that a reader needs)."""
    path.unlink(missing_ok=True)
    ids: dict[str, int] = {}
    pid = 281_477_392_629_760
    db = sqlite3.connect(path)
    db.executescript(
        """
        CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
        CREATE TABLE TARGET_INFO_GPU (id INTEGER NOT NULL, name TEXT, smCount INTEGER);
        CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, "end" INTEGER, eventType INTEGER NOT NULL, text TEXT,
          globalTid INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, "end" INTEGER NOT NULL, globalTid INTEGER,
          correlationId INTEGER, nameId INTEGER NOT NULL);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, "end" INTEGER NOT NULL, deviceId INTEGER NOT NULL,
          streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
          gridX INTEGER, gridY INTEGER, gridZ INTEGER, graphNodeId INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, "end" INTEGER NOT NULL, deviceId INTEGER NOT NULL,
          streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, copyKind INTEGER NOT NULL);
        """
    )
    db.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, ?, ?)", (GPU, SMS))
    last, seen, node = -1, set(), 0
    for r in rows(rung, steps, **made):
        if r.step != last:
            begin, last = r.start_ns - 300_000, r.step
            range_ = (begin, begin + 250_000, 59, f"step[DECODE bs={BATCH}]", pid + 4242)
            db.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?)", range_)
            call = begin
        if r.correlation not in seen:
            seen.add(r.correlation)
            call += 8_000
            name = (
                "cudaGraphLaunch_v10000"
                if r.in_graph
                else "cudaMemcpyAsync_v3020"
                if r.kind == "memcpy"
                else "cudaLaunchKernel_v7000"
            )
            runtime = (call, call + 6_000, pid + 4242, r.correlation, ids.setdefault(name, len(ids)))
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", runtime)
        head = (r.start_ns, r.start_ns + r.dur_ns, 0, STREAM, r.correlation, pid)
        if r.kind == "kernel":
            node += r.in_graph
            tail = (ids.setdefault(r.name, len(ids)), *r.grid, node if r.in_graph else None)
            db.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({', '.join('?' * 11)})", head + tail)
        else:
            db.execute(
                f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES ({', '.join('?' * 7)})", (*head, 1 if "HtoD" in r.name else 2)
            )
    db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, name) for name, i in ids.items()])
    db.commit()
    db.close()


def write_csv(path: Path, rung: str, steps: int, **made) -> None:
    """One rung as `nsys stats --report cuda_gpu_trace --format csv` prints it."""
    out = io.StringIO()
    out.write(f"Processing [{rung}.sqlite] with [cuda_gpu_trace.py]...\n\n")
    sheet = csv.writer(out, lineterminator="\n")
    title = "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB)"
    sheet.writerow(
        [*title.split(","), "Throughput (MB/s)", "SrcMemKd", "DstMemKd", "Device", "Ctx", "GreenCtx", "Strm", "Name"]
    )
    for r in rows(rung, steps, **made):
        grid = r.grid if r.kind == "kernel" else ("", "", "")
        name = r.name if r.kind == "kernel" else f"[CUDA memcpy {'Host-to-Device' if 'HtoD' in r.name else 'Device-to-Host'}]"
        blank = [""] * 10
        sheet.writerow([r.start_ns, r.dur_ns, r.correlation, *grid, *blank, f"{GPU} (0)", 1, "", STREAM, name])
    path.write_text(out.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the three rungs, or the file for --big")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--thin", type=int, default=2, help="glue launches merged into one (1: about 6000 launches a step)")
    parser.add_argument("--big", type=int, metavar="MB", help="write one large trace instead")
    args = parser.parse_args()
    if args.big:
        print(f"{args.out}: {write_big(args.out, args.big)} events")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    for rung in RUNGS:
        path = args.out / f"decode_{rung}.json.gz"
        write_kineto(path, rung, args.steps, thin=args.thin)
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
