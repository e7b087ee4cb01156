"""Kernels in Triton's interpreter, on float16 values of calls captured from a model.

    TRITON_INTERPRET=1 python -m deepdecode.ladder.interpreted FILE

FILE is what `Calls.pack` gives, written by `torch.save`. A process of its own, since Triton chooses to interpret when it is
first imported. Prints a list of [entry of the table, implementation, error, bound, note]; no error where a kernel failed.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch

from deepdecode.cards import find_card
from deepdecode.ladder.gates import Captured, capturing
from deepdecode.ops.linear import linear_ref
from deepdecode.ops.moe import moe_ref
from deepdecode.ops.quant import Weight
from deepdecode.ops.rows import PagedRows
from deepdecode.ops.table import MoeWeights, Ops
from deepdecode.testing.numeric import rel_err

# partial results of split keys are float16; the interpreter's products are float32
MAX_ERR = 2e-3
# interpreted, a token takes about a second
TOKENS = 1
# whose launches are interpreted: those of a card that runs the portable kernels
CARD = find_card("RTX 4090")
Found = tuple[str, str, float | None, float, str]


class Calls:
    """A table that keeps what its entries are handed: sparse_attn once for each number of keys, products and experts once."""

    def __init__(self, ops: Ops) -> None:
        table, self.attention = capturing(ops)
        self.products: dict[str, tuple[torch.Tensor, Weight]] = {}
        self.experts: tuple[Any, ...] | None = None

        def attn_in(x, weights, *rest):
            for name in ("q_kv", "rest"):
                if getattr(weights, name) is not None:
                    self.products.setdefault(name, (x, getattr(weights, name)))
            return ops.attn_in(x, weights, *rest)

        def moe(*args):
            self.experts = self.experts or args
            return ops.moe(*args)

        self.table = replace(table, attn_in=attn_in, moe=moe)

    def pack(self) -> dict[str, Any]:
        """Tensors, numbers and words alone, which the safe reader of `torch.load` takes."""
        made: dict[str, Any] = {"attention": [_pack_attention(call) for call in self.attention]}
        made["products"] = {name: (x, weight.data, weight.scale) for name, (x, weight) in self.products.items()}
        if self.experts is not None:
            x, ids, weights, stored, config, _ = self.experts
            parts = {f.name: getattr(stored, f.name) for f in fields(stored)}
            parts = {name: (part.data, part.scale) if isinstance(part, Weight) else part for name, part in parts.items()}
            made["experts"] = (x, ids, weights, parts, config.swiglu_limit)
        return made


def _pack_attention(call: Captured) -> dict[str, Any]:
    caches = [arg and (arg.data, arg.page_size, arg.fmt) for arg in (call.args[1], call.args[4])]
    args = [arg for arg in call.args if not isinstance(arg, PagedRows)]
    return {"args": args, "caches": caches, "sink": call.sink, "scale": call.scale, "turn": call.turn, "out": call.out}


def _unpack_attention(packed: dict[str, Any]) -> Captured:
    window, extra = (cache and PagedRows(*cache) for cache in packed["caches"])
    q, indices, lens, *more = packed["args"]
    extra_args = (extra, *more) if extra else (None, None, None)
    return Captured((q, window, indices, lens, *extra_args), packed["sink"], packed["scale"], packed["turn"], packed["out"])


def attention_checks(packed: list[dict[str, Any]]) -> Iterator[Found]:
    """The kernel of every card but Hopper's, in one piece and split, against float64."""
    from deepdecode.kernels import attention as kernel
    from deepdecode.kernels import rope
    from deepdecode.kernels.attention_merge import Turn
    from deepdecode.kernels.attention_plan import case_of, plan, plan_unsplit

    calls = [_unpack_attention(call).first(TOKENS) for call in packed]
    keys = ", ".join(str(call.keys) for call in calls)
    for name, choose in (("one program for all keys", plan_unsplit), ("keys split, merged", plan)):
        errors = []
        for call in calls:
            q, window, indices, _, extra, extra_indices, _ = call.args
            config = choose(case_of(q, window, indices, extra, extra_indices, gluon=False), CARD)
            args = (_halves(q), *call.args[1:])
            out = torch.full_like(args[0], float("nan"))
            turn = Turn(*call.turn) if config.splits > 1 else None
            kernel.launch(*args, sink=call.sink, scale=call.scale, out=out, lse=None, workspace=None, config=config, turn=turn)
            if turn is None:
                rope.launch(out, *call.turn, inverse=True, arch=80, out=out)
            errors.append(rel_err(out, replace(call, args=args).reference()))
        yield "sparse_attn", name, max(errors), MAX_ERR, f"{keys} keys"


def product_checks(packed: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]) -> Iterator[Found]:
    """The products of one x with stored weights against float64."""
    from deepdecode.kernels import linear as kernel
    from deepdecode.kernels.linear_plan import Case, plan

    for name, (x, data, scale) in packed.items():
        weight, half = Weight(data, scale), _halves(x)
        rows, width = weight.shape
        out = torch.full((len(x), 1, rows), float("nan"))
        stored = kernel.weight_name(data, weight.kind)
        kernel.launch(half[:, None], data, scale, weight.kind, out, plan(Case(len(x), 1, rows, width, stored), CARD))
        error = rel_err(out[:, 0], linear_ref(half.double(), weight))
        yield "attn_in", f"product with {name}", error, MAX_ERR, f"{stored}, {rows} x {width}"


def expert_checks(packed: tuple[Any, ...]) -> Iterator[Found]:
    """Routed and shared experts of one layer against float64."""
    from deepdecode.kernels import moe as kernel
    from deepdecode.kernels.moe_plan import Case, plan

    x, ids, weights, parts, limit = packed
    held: dict[str, Any] = {name: Weight(*part) if isinstance(part, tuple) else part for name, part in parts.items()}
    stored = MoeWeights(**held)
    x, ids, weights = (part[:TOKENS] for part in (x, ids, weights))
    half = _halves(x)
    out = torch.full_like(half, float("nan"))
    sizes = (len(x), ids.shape[1], stored.w13.shape[0], x.shape[1], stored.w13.shape[1] // 2, stored.shared13.shape[0] // 2)
    args: list[Any] = [half, ids.contiguous(), weights.contiguous()]
    for weight in (stored.w13, stored.w2, stored.shared13, stored.shared2):
        args += [weight.data, weight.scale]
    kinds = (stored.w13.kind, stored.shared13.kind)
    args += [*kinds, stored.first_expert, limit, out, plan(Case(*sizes), CARD)]
    kernel.launch(*args)
    error = rel_err(out, moe_ref(half.double(), ids, weights.double(), stored, limit))
    yield "moe", "routed and shared experts", error, MAX_ERR, f"{sizes[2]} experts of {kinds[0]}, a shared one of {kinds[1]}"


def _halves(x: torch.Tensor) -> torch.Tensor:
    """Values that float16 holds, as float32: the interpreter multiplies in that, and has no bfloat16 products."""
    return x.half().float().contiguous()


def checks(packed: dict[str, Any]) -> Iterator[Found]:
    """Every check, or why it was not run: a kernel that fails here must not hide what the others give."""
    for entry, check, part in (
        ("sparse_attn", attention_checks, packed["attention"]),
        ("attn_in", product_checks, packed["products"]),
        ("moe", expert_checks, packed["experts"]),
    ):
        try:
            yield from check(part)
        except Exception as error:
            words = " ".join(str(error).split())[:200]
            yield entry, "kernels", None, MAX_ERR, f"failed: {type(error).__name__}: {words}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(list(checks(torch.load(sys.argv[1])))))
