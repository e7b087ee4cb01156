"""How a plug-in stands in for an engine's function: ours where we cover the call, else the engine's, and a line says why."""

import logging
import re
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger("deepdecode")
T = TypeVar("T")


class Guard:
    """For one of the engine's functions, in one process.

    engine, what: as log lines call them, "vLLM" and "sparse attention".
    failed: why ours is not tried any more, None while it is.
    """

    def __init__(self, engine: str, what: str) -> None:
        self.engine, self.what = engine, what
        self.failed: str | None = None
        self._said: set[str] = set()

    def run(self, ours: Callable[[], T], theirs: Callable[[], T]) -> T:
        """What `ours` gives; what `theirs` gives where ours raises. A ValueError says that we do not cover this one call."""
        if self.failed is None:
            try:
                return ours()
            except ValueError as uncovered:
                self.say(f"a call is left to {self.engine}'s own {self.what}: {uncovered}")
            except Exception as error:
                line = f"{type(error).__name__}: {error}"
                # memory that is short now need not be short later; a kernel that does not compile is not tried at every layer
                if type(error).__name__ != "OutOfMemoryError":
                    self.failed = line
                self.say(f"{self.what} failed, {self.engine}'s own runs instead: {line}")
        return theirs()

    def say(self, line: str) -> None:
        """Once for lines that differ in their numbers only."""
        kind = re.sub(r"\d+", "0", line)
        if kind not in self._said:
            self._said.add(kind)
            log.warning("deepdecode in %s: %s", self.engine, line)
