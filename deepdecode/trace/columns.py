"""Columns that the readers of every format fill, and what they agree on."""

from array import array

from deepdecode.trace.model import Gpu

ROW, CALL = 11, 6  # columns of Collector.rows and .calls
MAX_NAMES, MAX_NAME_CHARS, MAX_NAME = 100_000, 32 << 20, 8192  # distinct kernel names, all of them, one of them
UNNAMED = "(unnamed)"
OTHER_NAMES = "(names past the limit)"
MAX_ANNOTATIONS, MAX_ANNOTATION = 200_000, 512
MAX_NS = 1 << 61  # times beyond are damage
HINT = "give a Kineto trace (.json, .json.gz), an Nsight Systems export (.sqlite), or an nsys stats CSV"

LAUNCH, GRAPH_LAUNCH, CAPTURES = 1, 2, 3


def call_kind(name: str) -> int:
    """LAUNCH, GRAPH_LAUNCH, CAPTURES, or 0 for a runtime call that neither works nor captures."""
    if "aunch" in name:
        return GRAPH_LAUNCH if "GraphLaunch" in name else 0 if "HostFunc" in name else LAUNCH
    if "Memcpy" in name or "Memset" in name:
        return LAUNCH
    return CAPTURES if any(w in name for w in ("StreamBeginCapture", "StreamEndCapture", "GraphInstantiate")) else 0


def clean(text: str) -> str:
    """Without halves of surrogate pairs, which JSON may hold and UTF-8 may not."""
    return text.encode("utf-8", "replace").decode()


class Collector:
    """Columns that grow event by event; shared by the readers of every format and every file of a folder."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.rows = array("q")  # 11 a row: device, process, stream, start, dur, name, kind, correlation, graph, node, blocks
        self.calls = array("q")  # 6 a call: process, thread, start, dur, correlation, is_graph
        self.annotations: list[tuple[str, int, int, int, int, bool]] = []  # as model.Annotation; see `annotate`
        self.runtime: list[array[int]] = []  # of each process: correlations of all its runtime calls
        self.file_of: list[int] = []  # of each process
        self.ranks: list[int | None] = []  # of each process
        self.base_ns: dict[int, int] = {}  # of each file: baseTimeNanoseconds
        self.gpus: dict[tuple[int, int], Gpu] = {}  # (file, device) -> what the file says of it
        self.notes: list[str] = []
        self.name_chars = 0
        self.events = self.bad = self.recovered = self.impossible = self.drops = self.captures = 0
        self.truncated = self.graph_summary = self.too_many_ranges = False

    def process(self, file: int) -> int:
        """A number for one more process."""
        self.file_of.append(file)
        self.ranks.append(None)
        self.runtime.append(array("q"))
        return len(self.file_of) - 1

    def name_id(self, name: str | int | float | None) -> int:
        found = self.names.get(name) if type(name) is str else None
        if found is None:
            name = UNNAMED if name is None or name == "" else clean(str(name)[:MAX_NAME])
            if name not in self.names:
                self.name_chars += len(name)
                if len(self.names) >= MAX_NAMES or self.name_chars > MAX_NAME_CHARS:
                    name = OTHER_NAMES
            found = self.names.setdefault(name, len(self.names))
        return found

    def annotate(self, name: str, start: int, dur: int, process: int, thread: int, gpu: bool) -> None:
        """Keep a named range, while there are not too many."""
        if len(self.annotations) >= MAX_ANNOTATIONS:
            self.too_many_ranges = True
        else:
            self.annotations.append((clean(name[:MAX_ANNOTATION]), start, max(dur, 0), process, thread, gpu))
