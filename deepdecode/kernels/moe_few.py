"""The experts' second product for a step of few tokens: every warp takes a pair of its own, and one program has their sum.

Where few pairs share an expert there is little to gain from reading it once for all of them. A program then takes the same
rows of the experts of all pairs, and of the shared one, and adds: no outputs of pairs in memory, and one launch less.
"""

import triton
import triton.language as tl

from deepdecode.kernels.linear import rows_of
from deepdecode.kernels.product import fetch, product, products, row_bytes


@triton.jit(do_not_specialize=["T", "pairs", "top_k", "first", "E"])
def w2_few_kernel(
    h_ptr,
    shared_h_ptr,
    ids_ptr,
    w_ptr,
    scale_ptr,
    shared_ptr,
    shared_scale_ptr,
    out_ptr,
    T,
    pairs,
    top_k,
    first,
    E,
    I,
    SHARED_I,
    C,
    stride_we,
    stride_w,
    stride_se,
    stride_s,
    stride_shared,
    stride_shared_scale,
    KIND: tl.constexpr,
    SHARED_KIND: tl.constexpr,
    E8M0: tl.constexpr,
    SHARED_E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    SHARED_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WARPS: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARED_K: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """out [T, C], T <= BLOCK_T and pairs <= WARPS * ROUNDS. PDL: as `w2_kernel`."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(m, C - 1)[None, :]
    t = tl.arange(0, BLOCK_T)[None, :]
    shared_row, shared_scale_row = rows_of(shared_ptr, shared_scale_ptr, row, stride_shared, stride_shared_scale, SHARED_KIND)
    if PDL:
        for turn in tl.static_range(ROUNDS):
            pair = turn * WARPS + tl.arange(0, WARPS)
            expert = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1).to(tl.int64) - first
            expert = tl.minimum(tl.maximum(expert, 0), E - 1)[:, None]
            fetch(w_ptr + expert * stride_we + row * stride_w, row_bytes(w_ptr, I, KIND))
        fetch(shared_row, row_bytes(shared_ptr, SHARED_I, SHARED_KIND))
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = product(
        shared_h_ptr + tl.arange(0, BLOCK_T) * SHARED_I,
        tl.arange(0, BLOCK_T) < T,
        shared_row,
        shared_scale_row,
        SHARED_I,
        SHARED_KIND,
        SHARED_E8M0,
        SHARED_EVEN,
        WARPS,
        WARPS,
        SHARED_K,
        INTERPRET,
    )
    for turn in tl.static_range(ROUNDS):
        pair = turn * WARPS + tl.arange(0, WARPS)
        expert = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1).to(tl.int64) - first
        here = (pair < pairs) & (expert >= 0) & (expert < E)
        expert = tl.where(here, expert, 0)[:, None]
        w_row, scale_row = rows_of(w_ptr + expert * stride_we, scale_ptr + expert * stride_se, row, stride_w, stride_s, KIND)
        parts = products(
            h_ptr + (pair * I)[:, None] + t * 0,
            here[:, None] & ((pair // top_k)[:, None] == t),
            w_row,
            scale_row,
            I,
            KIND,
            E8M0,
            EVEN,
            1,
            WARPS,
            BLOCK_K,
            INTERPRET,
        )
        # what a warp without a pair has read is not the token's, not even if it is NaN; nor is 0 times a NaN
        mine = here[:, None, None] & ((pair // top_k)[:, None, None] == t[:, None, :])
        total += tl.sum(tl.where(mine, parts, 0.0), 0)
    at = out_ptr + (tl.arange(0, BLOCK_T) * C)[None, :] + m[:, None]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(m < C)[:, None] & (t < T))
