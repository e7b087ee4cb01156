"""An error with a hint: what was wanted and what came, and then what to do."""


class HintedError(ValueError):
    """A refusal in one sentence; the command prints `hint` under it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint
