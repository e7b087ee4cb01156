"""Progress of long work on stderr: nothing in the first second, then at most a line a second (rewritten on a terminal)."""

import sys
import time


class Progress:
    """`step(done, total)` as often as the work likes; `end()` clears a terminal's line."""

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        self.what, self.quiet = what, quiet
        self.said = time.monotonic()
        self.shown = False
        self.terminal = sys.stderr.isatty()

    def step(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self.quiet or now - self.said < 1 or done >= total:
            return
        self.said, self.shown = now, True
        line = f"{self.what}: {done} of {total}"
        print(f"\r\x1b[K{line}" if self.terminal else line, end="" if self.terminal else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.shown and self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        self.shown = False
