"""What the tests put into each of vLLM's processes, as a vLLM plug-in of its own (test_vllm.py makes its entry point).

It repairs vLLM on a CPU, fills a model that has no checkpoint with seeded weights, and stands around our ops: a file of the
process counts each call, and what they give is corrupted as long as a file asks for it.
"""

import collections
import ctypes
import os
import sys
import zlib
from functools import wraps
from pathlib import Path

from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

FOLDER, FAIL = "VLLM_HARNESS", "VLLM_HARNESS_FAIL"
# two tokens of each of four sequences
MAX_BATCH = 8
# the ops that the plug-in calls: module, function, and how a test spoils what it gives
OPS = {
    "sparse_attn": ("deepdecode.ops.attention", "sparse_attn_decode", lambda out: out.mul_(1.5)),
    "index_topk": ("deepdecode.ops.indexer", "index_topk", lambda found: found[0][:, 32:].fill_(-1)),
    # its size does not matter, an RMSNorm follows
    "mhc_pre": ("deepdecode.ops.mhc", "mhc_pre", lambda found: found[0].copy_(found[0].flip(-1))),
    "mhc_post": ("deepdecode.ops.mhc", "mhc_post", lambda out: out.mul_(1.5)),
}


class Given(LogitsProcessor):
    """Leaves each request no choice but its own next token: what was asked for in `extra_args`."""

    def __init__(self, vllm_config, req_states):
        self.prompt_len, self.tokens = req_states.prompt_len, {}

    def add_request(self, req_idx, sampling_params):
        self.tokens[req_idx] = sampling_params.extra_args["tokens"]
        return True

    def apply(self, logits, ctx):
        for row, (slot, pos) in enumerate(zip(ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist(), strict=True)):
            # a draft may stand behind the last token that was asked for
            step = min(pos + 1 - int(self.prompt_len.np[slot]), len(self.tokens[slot]) - 1)
            kept = self.tokens[slot][step]
            logits[row].fill_(float("-inf"))
            logits[row, kept] = 0
        return logits


def register():
    repair()
    if FOLDER in os.environ:
        (Path(os.environ[FOLDER]) / f"{os.getpid()}.command").write_text(" ".join(sys.orig_argv))
        for op in OPS:
            stand_around(op, Path(os.environ[FOLDER]))


def repair():
    """vLLM 0.32 on a CPU as it must be to serve DeepSeek-V4, and quickly where Triton is interpreted."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.v1.attention.backends.mla import sparse_swa
    from vllm.v1.worker.utils import KVBlockZeroer

    def build_tile_scheduler(self, num_decode_tokens):
        # asked for layer kinds of later models too, which vLLM's own lacks
        return collections.defaultdict(lambda: None)

    window_indices = sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL

    def decode_window_indices(*args, num_tokens, **kwargs):
        # what is more than a batch is a prompt's, and no CPU class reads it
        if num_tokens <= MAX_BATCH:
            window_indices(*args, num_tokens=num_tokens, **kwargs)

    def zero_block_ids(self, block_ids):
        if self._meta is not None:
            starts, strides, sizes = (part.tolist() for part in self._meta[:3])
            for block in block_ids:
                for start, stride, size in zip(starts, strides, sizes, strict=True):
                    ctypes.memset(start + 4 * block * stride, 0, 4 * size)

    cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = build_tile_scheduler
    sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL = decode_window_indices
    KVBlockZeroer.zero_block_ids = zero_block_ids
    DummyModelLoader.load_weights = lambda self, model, model_config: fill(model)


def fill(model):
    """Weights that depend on the parameter's name and shape alone, of the sizes that a trained model's have."""
    import torch

    if FOLDER in os.environ:
        (Path(os.environ[FOLDER]) / f"{os.getpid()}.model").write_text(type(model).__module__)

    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if not tensor.is_floating_point():
            if "tid2eid" in name:
                # six experts of each token id
                step = torch.randint(1, 40, (len(tensor), 1), generator=seeded)
                tensor.data.copy_((torch.arange(len(tensor))[:, None] + step * torch.arange(tensor.shape[1])) % 256)
            continue
        if "rotary" in name or "cos_sin" in name:
            continue
        values = torch.randn(tensor.shape, generator=seeded)
        if "norm" in name:
            values = 1 + 0.1 * values
        elif name.endswith("_scale") and tensor.dim() == 1:
            values = 0.5 + 0.1 * values
        elif tensor.dim() > 1:
            # what a chosen expert adds is small: rounding decides now and then which the sixth of 256 is
            values *= (0.2 if "w2_" in name else 1.0) / tensor.shape[-1] ** 0.5
        if "embed" in name:
            values *= tensor.shape[-1] ** 0.5
        tensor.data.copy_(values)


def stand_around(op, folder):
    import importlib

    module, function, spoil = OPS[op]
    module = importlib.import_module(module)
    original = getattr(module, function)

    @wraps(original)
    def counted(first, *args, **kwargs):
        with open(folder / f"{os.getpid()}.{op}", "a") as file:
            file.write(f"{','.join(map(str, first.shape))}\n")
        if FAIL in os.environ:
            raise RuntimeError("no such kernel")
        found = original(first, *args, **kwargs)
        if (folder / f"spoil.{op}").exists():
            spoil(found)
        return found

    setattr(module, function, counted)
