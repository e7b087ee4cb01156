"""What the trace reader says: a trace as columns, and a profile as plain data that becomes JSON.

Times are integer nanoseconds. A `Trace` counts from its own `origin_ns`; a profile's times count from there too.
"""

from dataclasses import dataclass

import numpy as np

UNKNOWN_LIMIT = 0.05  # of busy time in no category; above it the categories say too little

SCHEMA = 1  # of Profile as JSON; rises when a field changes meaning or goes

WHOLE = "none"  # how Steps.signal begins when the whole capture counts as one step

SKIPPED = "skipped "  # how a note begins that names another file of a folder
KERNEL, MEMCPY, MEMSET = 0, 1, 2  # Table.kind

# machine id -> what a person reads; the order is the order of tables and bars
CATEGORIES: dict[str, str] = {
    "attention": "attention",
    "indexer": "indexer",
    "topk": "top-k",
    "mhc": "mHC",
    "compressor": "compressor",
    "gemm_tc": "GEMM tensor-core",
    "gemm_simt": "GEMM FP32 SIMT",
    "moe": "MoE",
    "norm": "norm",
    "quant": "quantise/cache",
    "glue": "elementwise/copy/reduce glue",
    "sampling": "sampling",
    "collective": "collective",
    "memory": "memcpy/memset",
    "unknown": "unknown",
}

OVERLAP_RULE = (
    "where n GPU activities run at once, each is charged 1/n of that time; "
    "odd nanoseconds go to the one that ends last; exclusive time plus idle is the window, to the nanosecond"
)


class TraceError(ValueError):
    """A file or argument that cannot be read as a trace; the message is one sentence, `hint` says what to do."""

    def __init__(self, message: str, hint: str = ""):
        # paths and library messages may bring newlines and escape sequences along
        super().__init__("".join(c if c.isprintable() else " " for c in message))
        self.hint = hint


def plural(number: int | str, one: str, many: str = "") -> str:
    """As in 1 kernel, 2 kernels."""
    return f"{number} {one if str(number) == '1' else many or one + 's'}"


# ---- what was read


@dataclass(frozen=True)
class Source:
    """One file that was read. `format` is "kineto", "nsys-sqlite" or "nsys-csv"; `bytes` as it lies on disk."""

    path: str
    sha256: str
    format: str
    bytes: int


@dataclass(frozen=True)
class Gpu:
    """One timeline: a device of one machine. An empty name or 0 where the file does not say."""

    device: int  # the id in the file
    process: int = 0  # whose launches it runs; the first one where several share it
    rank: int | None = None
    name: str = ""
    sms: int = 0


@dataclass(frozen=True)
class Health:
    """What the file was like. `recovered` counts events read one by one out of blocks that hold damage."""

    events: int = 0  # records that were read
    bad_events: int = 0  # records, or runs of damaged bytes, that could not be
    recovered: int = 0
    truncated: bool = False
    orphans: int = 0  # kernels whose launch is not in the file
    zero_durations: int = 0
    impossible_durations: int = 0  # negative, not finite, or past their successor by more than PDL explains
    drops: int = 0  # that the profiler itself admits
    overlapping: int = 0  # activities that start before the previous one of their stream has ended
    units: str = "us"  # of the file's timestamps
    capture: str = "gpu"  # "gpu", "gpu-only" (no launches), "cpu-only", "graph-capture", "graph-summary"


@dataclass(frozen=True, eq=False)
class Table:
    """GPU activities as columns of one length n, in order of (gpu, start, end)."""

    gpu: np.ndarray  # [n] int32 into Trace.gpus
    process: np.ndarray  # [n] int64, tells the files of a folder and the processes of a file apart
    stream: np.ndarray  # [n] int64
    start_ns: np.ndarray  # [n] int64, from Trace.origin_ns
    dur_ns: np.ndarray  # [n] int64, >= 0
    name: np.ndarray  # [n] int32 into Trace.names
    kind: np.ndarray  # [n] int8: KERNEL, MEMCPY, MEMSET
    correlation: np.ndarray  # [n] int64, -1 unknown; unique only together with process
    graph: np.ndarray  # [n] int64 graph id, -1 none or unknown
    node: np.ndarray  # [n] int64 graph node id, -1 none or unknown
    blocks: np.ndarray  # [n] int64 thread blocks of the launch, 0 unknown

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, eq=False)
class Launches:
    """Runtime calls that put work on a GPU, in order of start."""

    process: np.ndarray  # [m] int64, as in Table
    thread: np.ndarray  # [m] int64
    start_ns: np.ndarray  # [m] int64
    dur_ns: np.ndarray  # [m] int64
    correlation: np.ndarray  # [m] int64
    is_graph: np.ndarray  # [m] bool: cudaGraphLaunch, hipGraphLaunch and kin

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True)
class Annotation:
    """A range that the engine or the user named. `gpu` marks the copy that the profiler draws on the GPU's timeline."""

    name: str
    start_ns: int
    dur_ns: int
    process: int
    thread: int
    gpu: bool = False


@dataclass(frozen=True, eq=False)
class Trace:
    """Everything read from one file, or from a folder of ranks."""

    sources: tuple[Source, ...]
    table: Table
    names: tuple[str, ...]
    launches: Launches
    annotations: tuple[Annotation, ...]
    gpus: tuple[Gpu, ...]  # those that worked
    origin_ns: int
    health: Health
    notes: tuple[str, ...] = ()  # one sentence each


# ---- what a profile says


@dataclass(frozen=True)
class Vote:
    """What one signal says; `value` is None where the signal is absent."""

    signal: str
    value: int | str | None
    note: str = ""


@dataclass(frozen=True)
class Step:
    """One forward pass: from its first activity to the next step's first, the last one to its last activity's end."""

    start_ns: int
    wall_ns: int
    busy_ns: int
    kernels: int
    graph_launches: int
    phase: str  # "decode", "prefill", "mixed", "training", "unknown"
    batch: int | None = None


@dataclass(frozen=True)
class Steps:
    """The steps of one device that the profile counts, and how they were found."""

    count: int
    signal: str  # the vote that won
    votes: tuple[Vote, ...]
    agreement: float  # votes for `count` over votes given
    items: tuple[Step, ...]
    p50_ns: int  # of wall_ns
    min_ns: int
    max_ns: int
    p50_busy_ns: int
    p50_idle_ns: int  # of wall_ns - busy_ns: the idle time of a step, wherever one is named

    @property
    def whole(self) -> bool:
        """No steps were found: the capture counts as one."""
        return self.signal.startswith(WHOLE)


@dataclass(frozen=True)
class Kernel:
    """All activities of one name on one device. Capture-wide: count, sum_ns, durations. In the window: the rest."""

    name: str
    category: str
    rule: str  # which rule placed it, e.g. "builtin:28 fmha | flash_fwd"
    precision: str | None  # "fp4", "fp8", "int8", "bf16", "fp16", "tf32", "fp32" where the name says so
    kind: str  # "kernel", "memcpy", "memset"
    count: int
    sum_ns: int
    window_count: int
    window_sum_ns: int
    exclusive_ns: int
    launches_per_step: float
    exclusive_per_step_ns: float  # the mean
    p50_step_ns: int  # the median over all counted steps, 0 where fewer than half have it
    p50_ns: int
    min_ns: int
    max_ns: int
    blocks_p50: int | None  # thread blocks per launch


@dataclass(frozen=True)
class Category:
    """One category on one device, in the window; `step_ns` is its exclusive time in each counted step."""

    category: str
    count: int
    sum_ns: int
    exclusive_ns: int
    share: float  # of busy time
    launches_per_step: float
    step_ns: tuple[int, ...]
    p50_step_ns: int


@dataclass(frozen=True)
class Gap:
    """Idle time inside the window, with the kernels either side."""

    start_ns: int
    dur_ns: int
    before: str
    after: str


@dataclass(frozen=True)
class Slice:
    """One activity of the timeline; `name` indexes Timeline.names, `start_ns` counts from the step's start."""

    stream: int
    start_ns: int
    dur_ns: int
    name: int


@dataclass(frozen=True)
class Timeline:
    """The step of median wall time, as it ran. `left_out` counts its activities beyond the limit."""

    step: int
    wall_ns: int
    names: tuple[str, ...]
    categories: tuple[str, ...]  # of each name
    slices: tuple[Slice, ...]
    left_out: int = 0


@dataclass(frozen=True)
class DeviceProfile:
    """One GPU's timeline in one process. sum(exclusive_ns.values()) + idle_ns == window_ns."""

    device: int
    process: int
    rank: int | None
    gpu: str
    sms: int
    # the whole capture
    kernels: int
    copies: int  # memcpy and memset
    sum_ns: int  # of kernels; counts overlap twice
    union_ns: int  # time with any kernel, memcpy or memset running
    span_ns: int  # first start to last end
    # the counted steps
    window_ns: int
    busy_ns: int
    idle_ns: int
    exclusive_ns: dict[str, int]  # every category of CATEGORIES, 0 where none
    steps: Steps
    kernels_per_step: float
    graph_launches_per_step: float
    graph_kernel_share: float  # kernels that graph launches started, over kernels with a known launch
    graph_mode: str  # "full", "piecewise", "eager", "unknown"
    categories: tuple[Category, ...]  # those present, largest exclusive time first
    kernel_rows: tuple[Kernel, ...]  # largest exclusive time first
    gaps: tuple[Gap, ...]  # the longest, longest first
    gap_count: int
    unknown_share: float  # of busy time in the window
    timeline: Timeline | None


@dataclass(frozen=True)
class Warning:
    """A thing the reader should know; `code` is stable, `text` is one sentence."""

    code: str
    text: str


@dataclass(frozen=True)
class Profile:
    """One trace, accounted for. `main` indexes the busiest device; it is None when no GPU work was recorded."""

    schema: int
    sources: tuple[Source, ...]
    gpus: tuple[str, ...]  # distinct names of the devices that worked
    devices: tuple[DeviceProfile, ...]
    main: int | None
    phase: str  # "decode", "prefill", "mixed", "training", "capture", "cpu-only", "unknown"
    phase_votes: tuple[Vote, ...]
    batch: int | None  # sequences per step, where every step that says so says the same
    health: Health
    warnings: tuple[Warning, ...]
    overlap_rule: str = OVERLAP_RULE
    rules: str = "builtin"
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> DeviceProfile:
        """The busiest device; `TraceError` when there is none."""
        if self.main is None:
            raise TraceError("profile: no GPU work was recorded", "record with CUDA activities enabled")
        return self.devices[self.main]
