"""Four warps hand words to four others; only barriers order them. A program that test_attention_sanitizer.py runs."""

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


ROUNDS = 6
# matrix: a word for each of 128 lanes in order, which Triton stores by stmatrix; lane: out of order, so a plain store; four: 64
# words of four lanes each, as a wgmma accumulator has what belongs to its rows, by plain stores
LAYOUTS = {
    "matrix": (gl.BlockedLayout([1], [32], [4], [0]), 128),
    "lane": (gl.DistributedLinearLayout([], [[2], [1], [4], [8], [16]], [[32], [64]], [], [128]), 128),
    "four": (gl.SliceLayout(1, gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])), 64),
}


@gluon.jit
def _give(memory, ready, free, out_ptr, count, LAYOUT: gl.constexpr, N: gl.constexpr):
    for i in range(count):
        b = i & 1
        mbarrier.wait(free.index(b), ((i >> 1) & 1) ^ 1)
        memory.index(b).store(gl.arange(0, N, layout=LAYOUT) + i)
        barrier()
        mbarrier.arrive(ready.index(b), count=1)


@gluon.jit
def _take(memory, ready, free, out_ptr, count, LAYOUT: gl.constexpr, N: gl.constexpr):
    total = gl.zeros([N], gl.int32, layout=LAYOUT)
    for i in range(count):
        b = i & 1
        mbarrier.wait(ready.index(b), (i >> 1) & 1)
        total += memory.index(b).load(LAYOUT)
        barrier()
        mbarrier.arrive(free.index(b), count=1)
    gl.store(out_ptr + gl.arange(0, N, layout=LAYOUT), total)


@gluon.jit
def hand_over_kernel(out_ptr, count, LAYOUT: gl.constexpr, N: gl.constexpr, num_warps: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.int32, [2, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(2):
        mbarrier.init(ready.index(b), count=1)
        mbarrier.init(free.index(b), count=1)
    gl.warp_specialize(
        [
            (_give, (memory, ready, free, out_ptr, count, LAYOUT, N)),
            (_take, (memory, ready, free, out_ptr, count, LAYOUT, N)),
        ],
        [4],
        [64],
    )


if __name__ == "__main__":
    layout, n = LAYOUTS[sys.argv[1]]
    out = torch.empty(n, dtype=torch.int32, device="cuda")
    hand_over_kernel[1,](out, ROUNDS, layout, n, num_warps=4)
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), (torch.arange(n) * ROUNDS + sum(range(ROUNDS))).int())
    print("ran")
