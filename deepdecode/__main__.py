"""The `deepdecode` command: errors in one sentence, exit codes 0 (fine), 1 (found something), 2 (bad usage or our failure)."""

import os
import sys

# these read traces: they start without torch
TRACE_COMMANDS = {"profile", "compare", "advise"}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv and argv[0] in TRACE_COMMANDS:
            from deepdecode.trace.cli import main as trace_main

            return trace_main(argv)
        from deepdecode.cli import run

        return run(argv)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader has gone (`| head`); keep the interpreter's own flush at exit from failing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("DEEPDECODE_TRACEBACK") == "1":
            raise
        print(f"error: {_sentence(error)}", file=sys.stderr)
        hint = getattr(error, "hint", None)
        if hint is None and not isinstance(error, ValueError | OSError):
            hint = "DEEPDECODE_TRACEBACK=1 shows where this happened"
        if hint:
            print(f"\nhint: {hint}", file=sys.stderr)
        return 2


def _sentence(error: Exception) -> str:
    if isinstance(error, ValueError | OSError | RuntimeError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
