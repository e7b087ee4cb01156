"""A token's embedding into each of its streams, in one launch."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def embedding_kernel(tokens_ptr, weight_ptr, out_ptr, C, STREAMS: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(tokens_ptr + t) * C
    x = tl.load(weight_ptr + row + c, mask=c < C, other=0.0)
    for stream in tl.static_range(STREAMS):
        tl.store(out_ptr + (t * STREAMS + stream) * C + c, x, mask=c < C)


def launch(tokens: torch.Tensor, weight: torch.Tensor, streams: int, arch: int) -> torch.Tensor:
    """[T, streams, C] of tokens int64 [T] in the vocabulary and weight [V, C], contiguous; T > 0."""
    T, C = tokens.shape[0], weight.shape[1]
    out = torch.empty(T, streams, C, dtype=weight.dtype, device=weight.device)
    pdl = arch >= 90
    embedding_kernel[T, triton.cdiv(C, BLOCK)](
        tokens, weight, out, C, STREAMS=streams, BLOCK_C=BLOCK, PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {})
    )
    return out
