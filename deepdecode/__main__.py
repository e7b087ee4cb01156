"""The `deepdecode` command: every error in one sentence, no traceback unless asked."""

import io
import os
import sys
import traceback


def main(argv: list[str] | None = None) -> int:
    _open_streams()
    status = 0
    try:
        from deepdecode.cli import main as run

        status = run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()  # here, where a full disk is an error like any other; at exit it would be the interpreter's own
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_what_is_left()  # the reader has gone (`| head`), which changes nothing of what was found
        return status
    except Exception as error:
        _drop_what_is_left()
        if os.environ.get("DEEPDECODE_TRACEBACK") == "1":
            traceback.print_exc()
            return 2
        known = isinstance(error, ValueError | OSError) and str(error)
        text = _sentence(error)
        hint = getattr(error, "hint", None) or (None if known else "DEEPDECODE_TRACEBACK=1 shows where this happened")
        if isinstance(error, ModuleNotFoundError) and error.name:
            known, text, hint = True, f"{error.name} must be installed, got none", f"pip install {error.name.split('.')[0]}"
        if _is_out_of_memory(error):
            known, hint = True, "`deepdecode inspect DIR` says what fits where; a smaller --context or --batch takes less"
            text = f"out of memory: {str(error).splitlines()[0] if str(error) else 'no more was given'}"
        print(f"error: {text if known else f'{type(error).__name__}: {text}'}", file=sys.stderr)
        if hint:
            print(f"\nhint: {hint}", file=sys.stderr)
        return 2


def _drop_what_is_left() -> None:
    """What stdout does not take now it would refuse once more at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _sentence(error: Exception) -> str:
    """Of a system's error what happened and where: a full disk behind `> FILE` has no name of its own."""
    if type(error).__module__ == "builtins" and isinstance(error, OSError) and error.strerror:
        return f"{'output' if error.filename is None else error.filename}: {error.strerror}"
    return str(error)


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
