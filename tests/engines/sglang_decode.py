"""Run SGLang's DeepSeek-V4 attention backend on the CPU, plug-ins loaded as SGLang loads them, and save what it gives.

    python sglang_decode.py OUT [--break-signatures] [--hostile]

SGLang applies plug-ins once in a process, so that each way of switching ours is a process of its own (test_sglang.py).
"""

import argparse
import itertools
import logging
import types

import stand_ins
import torch

# heads of a rank at tensor parallelism 8, and what SGLang pads them to
HEADS, PADDED = 8, 64
# (compress ratio, tokens, heads of q, window page)
CASES = [
    *((ratio, 4, heads, page) for ratio, heads, page in itertools.product((0, 4, 128), (HEADS, PADDED), (256, 64))),
    # past 64 tokens SGLang goes its prefill way, which takes the padding off the heads
    *((ratio, 70, PADDED, 256) for ratio in (0, 4, 128)),
]
WINDOW_KEYS, EXTRA_KEYS, EXTRA_PAGE = 128, {4: 512, 128: 64}, {4: 64, 128: 2}


def pages(count, page_size, generator):
    """Pages in SGLang's own V4 layout: random codes and rotary values, scales from 1/8 to 4."""
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout

    layout = KVLayout.V4
    data_stride, scale_base, scale_stride = layout.row_addressing(page_size)
    pool = torch.zeros(count, layout.page_bytes(page_size), dtype=torch.uint8)
    for place in range(page_size):
        codes = torch.randn(count, 448, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
        rope = torch.randn(count, 64, generator=generator).bfloat16().view(torch.uint8)
        start, scales = place * data_stride, scale_base + place * scale_stride
        pool[:, start : start + 576] = torch.cat([codes, rope], dim=1)
        pool[:, scales : scales + 7] = torch.randint(124, 130, (count, 7), generator=generator, dtype=torch.uint8)
    return pool


def keys(tokens, width, rows, padding, generator):
    """Indices and lengths: a full row, shorter ones, and last a row that pads the batch: one key, `padding`."""
    lengths = torch.randint(1, width + 1, (tokens,), generator=generator, dtype=torch.int32)
    lengths[0], lengths[-1] = min(width, rows), 1
    lengths.clamp_(max=rows)
    indices = torch.full((tokens, width), -1, dtype=torch.int32)
    for row, length in zip(indices, lengths.tolist(), strict=True):
        row[:length] = torch.randperm(rows, generator=generator)[:length].int()
    indices[-1, 0] = padding
    return indices, lengths


def backend(ratio, tokens, window_page, generator):
    """SGLang's backend with a pool and a step's metadata, and nothing of what only a model runner gives."""
    import sglang.srt.layers.attention.deepseek_v4_backend as source
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    extra_page = EXTRA_PAGE.get(ratio, 64)
    window, extra = pages(1024 // window_page, window_page, generator), pages(768 // extra_page, extra_page, generator)

    class Pool(DeepSeekV4TokenToKVPool):
        request_window = None

        def __init__(self):
            pass

        def get_swa_key_buffer_radix(self, layer_id):
            return window

        def get_swa_key_page_size(self):
            return window_page

        def get_swa_key_bytes_per_token(self):
            return 584

        def get_extra_key_buffer(self, layer_id):
            return extra

        def get_extra_key_page_size(self, layer_id):
            return extra_page

        def get_extra_key_bytes_per_token(self, layer_id):
            return 584

    core = object.__new__(source.DSV4AttnMetadata)
    core.swa_page_indices, core.swa_topk_lengths = keys(tokens, WINDOW_KEYS, 1024, 0, generator)
    core.c0_flashmla_metadata = core.c4_flashmla_metadata = core.c128_flashmla_metadata = None
    if ratio:
        # SGLang raises lengths of 0 to 1: the one index is then -1
        indices, lengths = keys(tokens, EXTRA_KEYS[ratio], 768, -1, generator)
        core.c4_sparse_page_indices = core.c128_page_indices = indices
        core.c4_sparse_topk_lengths = core.c128_topk_lengths_clamp1 = lengths
    metadata = object.__new__(source.DSV4Metadata)
    metadata.core_attn_metadata, metadata.late_layer_tail = core, None
    made = object.__new__(source.DeepseekV4AttnBackend)
    made.forward_metadata, made.token_to_kv_pool = metadata, Pool()
    made.head_dim_v, made.softmax_scale = 512, 512**-0.5
    made.mtp_enabled = made.trtllm_attn = made.is_dsv41 = made.is_dspark_draft = made.mega_attn = False
    made.dsv4_prefill_backend, made.hisparse_coordinator = "auto", None
    return made


def inputs(heads, tokens, generator):
    q = torch.zeros(tokens, heads, 512, dtype=torch.bfloat16)
    q[:, :HEADS] = 2 * torch.randn(tokens, HEADS, 512, generator=generator)
    sink = torch.zeros(heads)
    sink[:HEADS] = torch.randn(HEADS, generator=generator)
    return q, sink


def forward(ratio, tokens, heads, window_page):
    """What the backend gives for one case, the same in every process."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    generator = torch.Generator().manual_seed(ratio + 1000 * tokens + heads + window_page)
    made = backend(ratio, tokens, window_page, generator)
    q, sink = inputs(heads, tokens, generator)
    layer = types.SimpleNamespace(layer_id=0, v_head_dim=512, tp_q_head_num=HEADS)
    batch = types.SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=tokens)
    return made.forward(q, q, q, layer, batch, compress_ratio=ratio, save_kv_cache=False, attn_sink=sink)


def call(*, strided=False, keyless=False):
    """SGLang's function itself, called as the backend calls it: out and lse. keyless: the first token has no key."""
    import sglang.kernels.ops.attention.flash_mla_sm120 as source

    generator = torch.Generator().manual_seed(7)
    q, sink = inputs(HEADS, 3, generator)
    q = q.unsqueeze(1)
    window = pages(4, 256, generator)[:, : 256 * 584].view(4, 256, 1, 584)
    indices, lengths = keys(3, WINDOW_KEYS, 1024, 0, generator)
    if keyless:
        lengths[0] = 0
    if strided:
        q = q.transpose(2, 3).contiguous().transpose(2, 3)
    return source.flash_mla_with_kvcache_sm120(
        q=q, k_cache=window, head_dim_v=512, softmax_scale=512**-0.5, indices=indices.unsqueeze(1), topk_length=lengths,
        attn_sink=sink, extra_k_cache=None, extra_indices_in_kvcache=None, extra_topk_length=None,
    )  # fmt: skip


def break_signatures():
    """Make every part's table expect of SGLang what it has not."""
    from dataclasses import replace

    from deepdecode.plugins import sglang, sources

    moved = sources.Function("kernels/ops/attention/flash_mla_sm120.py", "flash_mla_with_kvcache_sm120", ("q", "k_cache"))
    parts = tuple(replace(part, table=(*part.table, moved)) for part in sglang.PLUGIN.parts)
    sglang.PLUGIN = replace(sglang.PLUGIN, parts=parts)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--break-signatures", action="store_true")
    parser.add_argument("--hostile", action="store_true", help="also corrupt our op, break it, and call what it does not cover")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("deepdecode").addHandler(handler)
    stand_ins.install()
    if asked.break_signatures:
        break_signatures()

    from sglang.srt.plugins import load_plugins

    load_plugins()
    said = list(lines)
    import sglang.kernels.ops.attention.flash_mla_sm120 as source
    from sglang.srt.runtime_context import override_platform

    from deepdecode.ops import attention

    op, calls = attention.sparse_attn_decode, []

    def counted(q, *args, **kwargs):
        calls.append(tuple(q.shape))
        return op(q, *args, **kwargs)

    def corrupted(*args, **kwargs):
        out, lse = counted(*args, **kwargs)
        return 1.5 * out, lse

    def broken(q, *args, **kwargs):
        calls.append(tuple(q.shape))
        raise RuntimeError("no such kernel")

    attention.sparse_attn_decode = counted
    with override_platform(is_sm120=True, is_sm100=False, is_cuda=True):
        found = {"outs": {case: forward(*case) for case in CASES}, "calls": list(calls), "said": said}
        found["direct"], found["keyless"] = call(), call(keyless=True)
        calls.clear()
        found["strided"], found["strided_calls"] = call(strided=True), list(calls)
        found["replaced"] = hasattr(source.flash_mla_with_kvcache_sm120, "__wrapped__")
        if asked.hostile:
            found["strided_again"], found["strided_said"] = call(strided=True), lines[1:]
            attention.sparse_attn_decode = corrupted
            found["corrupted"] = {case: forward(*case) for case in CASES}
            calls.clear(), lines.clear()
            attention.sparse_attn_decode = broken
            found["broken"] = call(), call(), list(calls), list(lines)
    torch.save(found, asked.out)


if __name__ == "__main__":
    main()
