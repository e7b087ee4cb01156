"""Tensor parallel over real processes (gloo) equals one process."""

import dataclasses

import torch
import torch.multiprocessing as mp
from small_checkpoint import PLAIN

from deepdecode.checkpoint import load_model, seeded_tensors, write_checkpoint
from deepdecode.distributed import join, leave
from deepdecode.runner import Runner, Sampling
from deepdecode.testing.numeric import rel_err

# sums over ranks in another order, in float32
ORDER_ERR = 2e-6
CONFIG = dataclasses.replace(PLAIN, num_layers=3, compress_ratios=(0, 4, 128))
IDS = [(7 * i * i + 3) % 256 for i in range(150)]


def rank_main(rank, size, folder, port, out):
    import os

    torch.set_num_threads(1)
    os.environ.update(WORLD_SIZE=str(size), RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    place = join(torch.device("cpu"))
    weights = load_model(folder, slice=(size, rank))
    runner = Runner(weights, max_len=200, fmt="f32", ranks=place.collectives)
    slot = runner.cache.acquire()
    logits = runner.prefill(slot, IDS, every=True)
    runner.cache.release(slot)
    tokens = [t.id for t in runner.generate([IDS], Sampling(max_new_tokens=6))]
    torch.save((logits, tokens), f"{out}/{rank}.pt")
    leave()


def test_two_ranks_equal_one(tmp_path):
    import socket

    folder = tmp_path / "model"
    write_checkpoint(folder, CONFIG, seeded_tensors(CONFIG, 1, quantized=False))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(rank_main, args=(2, str(folder), port, str(tmp_path)), nprocs=2)
    whole = load_model(folder)
    # every head has a sink of its own, so a wrong slice shows
    assert len(whole.layers[0].attn.sink.unique()) == CONFIG.num_heads
    runner = Runner(whole, max_len=200, fmt="f32")
    logits = runner.prefill(runner.cache.acquire(), IDS, every=True)
    tokens = [t.id for t in Runner(whole, max_len=200, fmt="f32").generate([IDS], Sampling(max_new_tokens=6))]
    for rank in range(2):
        theirs, their_tokens = torch.load(tmp_path / f"{rank}.pt")
        assert rel_err(theirs, logits) < ORDER_ERR
        assert their_tokens == tokens
