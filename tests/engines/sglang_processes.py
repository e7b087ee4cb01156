"""Start what SGLang starts, by its own functions and up to where they want a server, and save what each process has of us.

    python sglang_processes.py OUT

The launcher, two tensor-parallel ranks' schedulers, the data-parallel controller and the detokenizer.
"""

import asyncio
import logging
import multiprocessing
import sys
import types

import stand_ins

# in every process, before SGLang is imported: what a server needs and no part of ours
stand_ins.install("fastapi", "setproctitle", "uvicorn")
sys.modules.setdefault("uvloop", types.SimpleNamespace(EventLoopPolicy=asyncio.DefaultEventLoopPolicy))


def start(name):
    """What SGLang does first in this process; without a server it cannot go on."""
    if name == "launcher":
        from sglang.srt.entrypoints.engine import Engine

        Engine(server_args=None)
    elif name.startswith("scheduler"):
        from sglang.srt.managers.scheduler import run_scheduler_process

        run_scheduler_process(None, None, 0, int(name[-1]), 0, None, None)
    elif name == "controller":
        from sglang.srt.managers.data_parallel_controller import run_data_parallel_controller_process

        run_data_parallel_controller_process(None, None, None)
    else:
        from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

        run_detokenizer_process(None, None)


def told(name, pipe):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("deepdecode").addHandler(handler)
    try:
        start(name)
        stopped = "nowhere"
    except Exception as error:
        stopped = f"{type(error).__name__}: {error}"
    import torch
    from sglang.kernels.ops.attention import flash_mla_sm120

    replaced = hasattr(flash_mla_sm120.flash_mla_with_kvcache_sm120, "__wrapped__")
    pipe.send((name, {"said": lines, "replaced": replaced, "stopped": stopped, "cuda": torch.cuda.is_initialized()}))


def main():
    import torch

    context, found = multiprocessing.get_context("spawn"), {}
    for names in (("launcher", "detokenizer"), ("scheduler 0", "scheduler 1"), ("controller",)):
        started = []
        for name in names:
            ours, theirs = context.Pipe()
            process = context.Process(target=told, args=(name, theirs))
            process.start()
            started.append((process, ours))
        for process, ours in started:
            found.update([ours.recv()])
            process.join()
    torch.save(found, sys.argv[1])


if __name__ == "__main__":
    main()
