"""An error with a hint: what was wanted and what came, and then what to do."""

import os
import sys
from collections.abc import Callable


class HintedError(ValueError):
    """A refusal in one sentence; the command prints `hint` under it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def told(run: Callable[[], int]) -> int:
    """The exit code of a module that is run by itself: a refusal is one sentence and 2, as the command has it."""
    try:
        return run()
    except (ValueError, OSError) as error:
        if os.environ.get("DEEPDECODE_TRACEBACK") == "1":
            raise
        print(f"error: {error}", file=sys.stderr)
        hint = getattr(error, "hint", None)
        if hint:
            print(f"\nhint: {hint}", file=sys.stderr)
        return 2
