"""DeepSeek-V4 of Hugging Face transformers with our ops inside: exact, for people who debug a model or an op.

    report = enable(model)   # model(...) and model.generate(...) now run our ops; print(report)
    disable(model)           # and as it was

Attention runs sparse over transformers' own dense cache, [window; compressed entries] of each sequence: the keys that the mask
leaves. RMSNorm, hyper-connections and routed experts run as our ops on the model's own parameters; nothing is copied or cached,
so weights may be edited meanwhile. In float32 the logits are the model's to rounding; in bfloat16 ours round once where
transformers rounds at every step.

What a call needs and we do not cover (gradients, attention weights, float16, autocast, torch.compile, a captured graph) runs as
in transformers, and is counted. A transformers whose source differs from the table in transformers_source.py stays untouched.
"""

import importlib
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from deepdecode.ops._check import describe, log
from deepdecode.ops.attention import sparse_attn_decode, sparse_attn_prefill
from deepdecode.ops.mhc import STREAMS, mhc_head, mhc_post, mhc_pre
from deepdecode.ops.moe import moe
from deepdecode.ops.norm import head_norm, rms_norm
from deepdecode.ops.quant import Weight
from deepdecode.ops.rows import PagedRows
from deepdecode.ops.table import MoeWeights
from deepdecode.plugins.sources import folder, problems, version
from deepdecode.plugins.transformers_source import EXPECTED, MODULE, SINCE

Tensor = torch.Tensor
FORMATS = {torch.bfloat16: "bf16", torch.float32: "f32"}
# width of a shared expert that adds nothing: the kernels take none of width 0
_NARROW = 16


@dataclass(eq=False)
class Report:
    """What `enable` did, and what has run since.

    version: of the transformers found. problem: why nothing is replaced, "" where something is.
    replaced: modules by op. left: modules that stay as they are, by reason.
    calls: how often each op ran. fell_back: how often transformers' own code ran in its place, by op and reason.
    """

    version: str
    problem: str = ""
    replaced: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    fell_back: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        head = f"transformers {self.version}: "
        if self.problem:
            return f"{head}left untouched: {self.problem}"
        said = head + "replaced " + ", ".join(f"{op} in {n} modules" for op, n in self.replaced.items())
        return said + "".join(f"; {n} modules left: {reason}" for reason, n in self.left.items())


# the modules that run our ops; a copy of an enabled model is not among them and runs as in transformers
_enabled: WeakKeyDictionary[torch.nn.Module, Report] = WeakKeyDictionary()
# modeling_deepseek_v4's eager_attention_forward while ours stands in its place
_eager: list[Callable[..., Any]] = []


def enable(model: torch.nn.Module) -> Report:
    """Let the DeepSeek-V4 layers in `model` run our ops, in place. Never raises for a model or an engine it does not know.

    A second call takes in only what came since. DEEPDECODE_ENABLE=0 switches it off. One line is logged.
    """
    report = Report(version("transformers"), _problem(model))
    if not report.problem:
        modeling = importlib.import_module(MODULE)
        _replace(model, modeling, report)
        if not report.replaced:
            known = any(module in _enabled for module in model.modules())
            report.problem = "its layers run our ops already" if known else "the model has no DeepSeek-V4 layer to replace"
    # an untouched model is news, a replaced one is what was asked for
    (log.warning if report.problem else log.info)("%s", report)
    return report


def disable(model: torch.nn.Module) -> None:
    """Give the modules in `model` back their own forward; a model that is not enabled stays as it is."""
    for module in model.modules():
        if _enabled.pop(module, None) is not None and _is_ours(module.__dict__.get("forward")):
            del module.__dict__["forward"]
    modeling: Any = sys.modules.get(MODULE)
    # what somebody put over ours since stays, and ours under it passes everything on
    if _eager and not _enabled and modeling.eager_attention_forward is _eager_attention:
        modeling.eager_attention_forward = _eager.pop()


def installed() -> dict[str, Any]:
    """What `enable` would do with the transformers that is installed, without importing it.

    Returns:
        engine, version, replaces: functions; problem: one sentence, "" where there is none.
    """
    replaces = [entry.name for entry in EXPECTED]
    return {"engine": "transformers", "version": version("transformers"), "replaces": replaces, "problem": _engine_problem()}


def _problem(model: torch.nn.Module) -> str:
    if os.environ.get("DEEPDECODE_ENABLE") == "0":
        return "DEEPDECODE_ENABLE=0"
    if not isinstance(model, torch.nn.Module):
        return f"model must be a torch.nn.Module, got {type(model).__name__}"
    if not any(type(module).__module__ == MODULE for module in model.modules()):
        return "the model has no DeepSeek-V4 layer of transformers"
    return _engine_problem()


def _engine_problem() -> str:
    package = folder("transformers")
    if package is None:
        return "it is not installed"
    found = tuple(int(part) for part in re.findall(r"\d+", version("transformers"))[:2])
    # a checkout may not say its version; its source does
    if found and found < SINCE:
        return f"{SINCE[0]}.{SINCE[1]} is the first version that this plug-in knows"
    return "; ".join(problems(package, EXPECTED))


def _replace(model: torch.nn.Module, modeling: Any, report: Report) -> None:
    forwards = {
        modeling.DeepseekV4DecoderLayer: ("mhc_post", _layer_forward),
        modeling.DeepseekV4HyperConnection: ("mhc_pre", _hyper_forward),
        modeling.DeepseekV4HyperHead: ("mhc_head", _head_forward),
        modeling.DeepseekV4Experts: ("moe", _experts_forward),
        modeling.DeepseekV4RMSNorm: ("rms_norm", _norm_forward),
        modeling.DeepseekV4UnweightedRMSNorm: ("head_norm", _head_norm_forward),
    }
    heads = {module.q_b_norm for module in model.modules() if type(module) is modeling.DeepseekV4Attention}
    for module in model.modules():
        if type(module) is modeling.DeepseekV4UnweightedRMSNorm and module not in heads:
            # part of a hyper-connection, whose op has it inside
            continue
        # a subclass may compute something else
        is_attention = type(module) is modeling.DeepseekV4Attention
        if module in _enabled or not (is_attention or type(module) in forwards):
            continue
        op, forward = ("sparse_attn", None) if is_attention else forwards[type(module)]
        reason = _static_reason(module, op, forward)
        if reason:
            report.left[f"{op}: {reason}"] += 1
            continue
        _enabled[module] = report
        report.replaced[op] += 1
        if forward is not None:
            # a bound method: in a deep copy of the model it is the copy's, and a pickle finds the class's by its name
            module.forward = MethodType(forward, module)
    # The attention of a module is looked up by this name at each call. An entry in transformers' registry would do as well, but
    # would have to change the model's config, which then refuses output_attentions.
    if "sparse_attn" in report.replaced and not _eager:
        _eager.append(modeling.eager_attention_forward)
        modeling.eager_attention_forward = _eager_attention


def _static_reason(module: Any, op: str, forward: Any) -> str:
    """Why a module never takes our op, "" if it may."""
    if forward is not None and "forward" in module.__dict__:
        return "its forward has been replaced by somebody else"
    if op == "sparse_attn" and module.config._attn_implementation not in ("eager", None):
        return f"its attention is {module.config._attn_implementation}, not eager"
    if op in ("mhc_pre", "mhc_post", "mhc_head"):
        streams = (module.attn_hc if op == "mhc_post" else module).hc_mult
        return "" if streams == STREAMS else f"{streams} streams, not {STREAMS}"
    if op == "moe" and module.config.hidden_act != "silu":
        return f"an activation {module.config.hidden_act}, not silu"
    return ""


def _is_ours(forward: Any) -> bool:
    return inspect.ismethod(forward) and forward.__func__.__module__ == __name__


def _reason(x: Tensor, *parameters: Tensor) -> str:
    """Why this call is not for our ops, "" if it is."""
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if type(x) is not Tensor or any(type(p.data) is not Tensor for p in parameters):
        return "tensors of another class"
    if x.dtype not in FORMATS:
        return f"activations in {x.dtype}"
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters)):
        return "gradients are asked for"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on"
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return ""


def _fall_back(report: Report, op: str, reason: str) -> None:
    said = f"{op}: {reason}"
    report.fell_back[said] += 1
    if report.fell_back[said] == 1:
        log.warning("%s; transformers' own code runs", said)


def _run(module: Any, op: str, ours: Callable[..., Any], x: Tensor, *args: Any, parameters: tuple[Tensor, ...] = ()) -> Any:
    """What `ours` gives, or the class's own forward where it does not cover the call."""
    report = _enabled.get(module)
    if report is not None:
        reason = _reason(x, *parameters)
        if not reason:
            try:
                out = ours(module, x, *args)
            except ValueError as error:
                reason = str(error)
            else:
                report.calls[op] += 1
                return out
        _fall_back(report, op, reason)
    return type(module).forward(module, x, *args)


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return _run(self, "rms_norm", _norm, hidden_states, parameters=(self.weight,))


def _norm(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, module.variance_epsilon)


def _head_norm_forward(self: Any, x: Tensor) -> Tensor:
    return _run(self, "head_norm", _head_norm, x)


def _head_norm(module: Any, x: Tensor) -> Tensor:
    return head_norm(x, module.eps)


def _hyper_forward(self: Any, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _run(self, "mhc_pre", _hyper, hidden_streams, parameters=(self.fn, self.base, self.scale))


def _hyper(module: Any, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    B, S = streams.shape[:2]
    x, post, comb = mhc_pre(
        streams.flatten(0, 1), module.fn.float(), module.base.float(), module.scale.float(),
        norm_eps=module.input_norm.eps, hc_eps=module.hc_eps, iters=module.hc_sinkhorn_iters,
    )  # fmt: skip
    return post.unflatten(0, (B, S)), comb.unflatten(0, (B, S)), x.unflatten(0, (B, S))


def _head_forward(self: Any, x: Tensor) -> Tensor:
    return _run(self, "mhc_head", _head, x, parameters=(self.hc_fn, self.hc_base, self.hc_scale))


def _head(module: Any, x: Tensor) -> Tensor:
    fn, base, scale = module.hc_fn.float(), module.hc_base.float(), module.hc_scale.float()
    out = mhc_head(x.flatten(0, 1), fn, base, scale, norm_eps=module.input_norm.eps, hc_eps=module.eps)
    return out.unflatten(0, x.shape[:2])


def _layer_forward(self: Any, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
    """The decoder layer's own steps; what each sublayer gives enters the streams through `mhc_post`."""
    report = _enabled.get(self)
    reason = _reason(hidden_states) if report is not None else ""
    if report is None or reason:
        if report is not None:
            _fall_back(report, "mhc_post", reason)
        return type(self).forward(self, hidden_states, input_ids=input_ids, **kwargs)
    post, comb, x = self.attn_hc(hidden_states)
    y, _ = self.self_attn(self.input_layernorm(x), **kwargs)
    hidden_states = _write(report, y, hidden_states, post, comb)
    post, comb, x = self.ffn_hc(hidden_states)
    y = self.mlp(self.post_attention_layernorm(x), input_ids=input_ids)
    return _write(report, y, hidden_states, post, comb)


def _write(report: Report, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    try:
        if torch.is_grad_enabled() and (y.requires_grad or post.requires_grad):
            raise ValueError("gradients are asked for")
        out = mhc_post(y.flatten(0, 1), streams.flatten(0, 1), post.flatten(0, 1), comb.flatten(0, 1))
    except ValueError as error:
        # the sublayer has run, and its cache has grown: only this step is left to transformers' formula
        _fall_back(report, "mhc_post", str(error))
        mixed = comb.to(streams.dtype).transpose(-1, -2) @ streams
        return post.to(streams.dtype).unsqueeze(-1) * y.unsqueeze(-2) + mixed
    report.calls["mhc_post"] += 1
    return out.unflatten(0, streams.shape[:2])


def _experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    parameters = (self.gate_up_proj, self.down_proj)
    return _run(self, "moe", _experts, hidden_states, top_k_index, top_k_weights, parameters=parameters)


def _experts(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The routed experts alone: the shared one is a module of its own in transformers, and a narrow one of zeros here."""
    w13, w2 = Weight(module.gate_up_proj), Weight(module.down_proj)
    shared13 = Weight(w13.data.new_zeros(2 * _NARROW, x.shape[1]))
    shared2 = Weight(w2.data.new_zeros(x.shape[1], _NARROW))
    # a pair of another rank's expert has the id `num_experts` in transformers: no expert of ours either
    return moe(x, ids, weights.float(), MoeWeights(x, None, None, w13, w2, shared13, shared2), module.limit)


for _function in (_norm_forward, _head_norm_forward, _hyper_forward, _head_forward, _layer_forward, _experts_forward):
    _function.__name__ = "forward"


def _eager_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float | int = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' eager attention, which passes the modules that are enabled to `sparse_attn`."""
    report = _enabled.get(module)
    if report is not None:
        reason = _reason(query, module.sinks) or _attention_reason(key, value, dropout)
        if not reason:
            try:
                out = _sparse(module, query, key, attention_mask, scaling)
            except ValueError as error:
                reason = str(error)
            else:
                report.calls["sparse_attn"] += 1
                return out, None
        _fall_back(report, "sparse_attn", reason)
    return _eager_original()(module, query, key, value, attention_mask, scaling, dropout, **kwargs)


def _eager_original() -> Callable[..., Any]:
    # a caller that kept our function after `disable` finds transformers' own in its place again
    return _eager[0] if _eager else sys.modules[MODULE].eager_attention_forward  # type: ignore[attr-defined]


def _attention_reason(key: Tensor, value: Tensor, dropout: float | int) -> str:
    if value is not key:
        return "values that are not the keys"
    if dropout:
        return "dropout"
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    if collector is None or "attentions" in (collector.get() or ()):
        return "attention weights are asked for"
    return ""


def _sparse(module: Any, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """query [B, H, S, D], key [B, 1, N, D], mask [B or 1, 1, S, N] of 0 and -inf -> [B, S, H, D].

    Each sequence's N rows are one page. A token's keys are those that the mask leaves, in their order.
    """
    B, H, S, D = query.shape
    N = key.shape[2]
    if key.shape != (B, 1, N, D):
        raise ValueError(f"key must be {[B, 1, N, D]}, got {describe(key)}")
    seen = _seen(mask, B, S, N, key.device)
    lens = seen.sum(dim=-1, dtype=torch.int32)
    K = int(lens.max()) if lens.numel() else 0
    # the keys first, in the order of the cache
    order = seen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :K]
    rows = order + N * torch.arange(B, device=key.device)[:, None, None]
    cache = PagedRows(key.reshape(B, N, D), N, FORMATS[key.dtype])
    attend = sparse_attn_decode if S == 1 else sparse_attn_prefill
    out = attend(
        query.transpose(1, 2).reshape(B * S, H, D).contiguous(), cache, rows.reshape(B * S, K).int(), lens.flatten(),
        sink=module.sinks.float(), scale=scaling,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.view(B, S, H, D)


def _seen(mask: Tensor | None, B: int, S: int, N: int, device: torch.device) -> Tensor:
    """bool [B, S, N]: which keys a token sees."""
    if mask is None:
        return torch.ones(B, S, N, dtype=torch.bool, device=device)
    if mask.dim() != 4 or mask.shape[0] not in (1, B) or mask.shape[1:] != (1, S, N) or not mask.is_floating_point():
        raise ValueError(f"mask must be [{B}, 1, {S}, {N}] floating point, got {describe(mask)}")
    seen = mask == 0
    if not (seen | (mask <= torch.finfo(mask.dtype).min)).all():
        raise ValueError("mask must be 0 or minus infinity everywhere, got other values")
    return seen[:, 0].expand(B, S, N)
