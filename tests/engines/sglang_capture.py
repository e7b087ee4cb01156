"""SGLang's backend with our hooks, walked with tensors that have no values, as its graphs capture it on a GPU.

    python sglang_capture.py OUT

A CUDA graph holds no look at a value and no copy from the host; on tensors without values either is an error. What is saved for
each step: who was called, and the shape that came back.
"""

import contextlib
import functools
import sys
import types

import sglang_decode as decode
import stand_ins
import torch

# card, whether SGLang captures, heads of q, the rank's own
STEPS = [
    ("RTX PRO 6000", True, 8, 8),
    ("RTX PRO 6000", True, 64, 8),
    ("DGX Spark GB10", False, 16, 16),
    ("H200", True, 64, 8),
    ("H200", True, 64, 64),
    ("H200", False, 64, 8),
    ("A100-80", False, 64, 8),
    ("RTX 4090", True, 64, 32),
]
TOKENS = 16
called = []


def on(name):
    """Take the tensors without values for those of this card."""
    from deepdecode.cards import find_card
    from deepdecode.kernels import attention_plan, launching
    from deepdecode.plugins import sglang_ops

    card = find_card(name)
    for module in (attention_plan, launching, sglang_ops):
        module.card_of = lambda device: card
    torch.cuda.get_device_capability = lambda device=None: divmod(card.arch, 10)
    return card


def stand_around():
    from triton.runtime.jit import JITFunction

    from deepdecode.ops import attention

    attention._attend_op = attention._attend_caches
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.Tensor.is_cuda = property(lambda tensor: tensor.is_meta)
    torch.Tensor.data_ptr = lambda tensor: tensor.storage_offset() * tensor.element_size()
    JITFunction.run = lambda kernel, *args, **options: called.append(kernel.fn.__name__)


def own_flash_mla(*, q, **rest):
    called.append("FlashMLA")
    return torch.empty_like(q), None


def forward(name, captured, heads, own, ratio):
    from sglang.kernels.ops.attention import flash_mla_interface
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
    from sglang.srt.runtime_context import override_platform

    made = decode.backend(ratio, TOKENS, 256, torch.Generator().manual_seed(ratio))
    made._flash_mla_with_kvcache = functools.partial(flash_mla_interface.flash_mla_with_kvcache, use_legacy=True)
    made._use_sparse_prefill = lambda *args, **kwargs: False
    core, pool = made.forward_metadata.core_attn_metadata, made.token_to_kv_pool
    for member, value in list(vars(core).items()):
        if isinstance(value, torch.Tensor):
            setattr(core, member, value.to("meta"))
    for read in ("get_swa_key_buffer_radix", "get_extra_key_buffer"):
        setattr(pool, read, functools.partial(lambda pages, layer_id: pages, getattr(pool, read)(0).to("meta")))
    core.c0_flashmla_metadata = core.c4_flashmla_metadata = core.c128_flashmla_metadata = (
        flash_mla_interface.FlashMLASchedMeta()
    )
    q = torch.empty(TOKENS, heads, 512, dtype=torch.bfloat16, device="meta")
    layer = types.SimpleNamespace(layer_id=0, v_head_dim=512, tp_q_head_num=own)
    batch = types.SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=TOKENS)
    sink = torch.empty(heads, device="meta")
    arch = on(name).arch
    called.clear()
    mode = model_capture_mode() if captured else contextlib.nullcontext()
    with override_platform(is_sm120=arch // 10 == 12, is_sm100=False, is_cuda=True), mode:
        out = made.forward(q, q, q, layer, batch, compress_ratio=ratio, save_kv_cache=False, attn_sink=sink)
    return tuple(out.shape), list(called)


def main():
    stand_ins.install()
    import flash_mla

    flash_mla.flash_mla_with_kvcache = own_flash_mla
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from deepdecode.plugins import sglang_ops

    stand_around()
    found = {(*step, ratio): forward(*step, ratio) for step in STEPS for ratio in (0, 4, 128)}
    found["failed"] = sglang_ops.GUARDS["attention"].failed
    torch.save(found, sys.argv[1])


if __name__ == "__main__":
    main()
