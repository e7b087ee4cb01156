"""The `deepdecode` command: every error in one sentence, no traceback unless asked."""

import io
import os
import sys
import traceback


def main(argv: list[str] | None = None) -> int:
    _open_streams()
    try:
        from deepdecode.cli import main as run

        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader has gone (`| head`); keep the interpreter's own flush at exit from failing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("DEEPDECODE_TRACEBACK") == "1":
            traceback.print_exc()
            return 2
        known = isinstance(error, ValueError | OSError) and str(error)
        hint = getattr(error, "hint", None) or (None if known else "DEEPDECODE_TRACEBACK=1 shows where this happened")
        if _is_out_of_memory(error):
            known, hint = True, "`deepdecode inspect DIR` says what fits where; a smaller --context or --batch takes less"
            error = f"out of memory: {str(error).splitlines()[0] if str(error) else 'no more was given'}"
        print(f"error: {error if known else f'{type(error).__name__}: {error}'}", file=sys.stderr)
        if hint:
            print(f"\nhint: {hint}", file=sys.stderr)
        return 2


def _is_out_of_memory(error: Exception) -> bool:
    # torch's error on a GPU by its name, since torch may not be loaded; on a CPU it is a RuntimeError like any other
    on_gpu = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, MemoryError) or on_gpu or "can't allocate memory" in str(error)


def _open_streams() -> None:
    """Where the caller closed stdout or stderr, what is printed goes nowhere; what stdout cannot spell becomes `?`."""
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
