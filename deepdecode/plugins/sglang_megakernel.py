"""Our parts under SGLang's official contract for replaced decode steps, --enable-nvidia-megakernel, on sm_120 and sm_121.

A covered step is SGLang's own forward with our attention, indexer and hyper-connections in it; every other step is SGLang's
alone. What the contract adds: SGLang refuses at start-up what the spec does not list, all ranks agree, and graphs are checked.
DEEPDECODE_SGLANG=megakernel registers it; a megakernel of another package is left its place.
"""

import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from deepdecode.plugins.report import why_off
from deepdecode.plugins.sglang_source import MEGAKERNEL, PLUGIN

log = logging.getLogger("deepdecode")

ARCHITECTURE = "DeepseekV4ForCausalLM"
NAME, GROUP = "nvidia_megakernel", "sglang.srt.plugins"
MAX_ROWS = 64
# relative errors of what the parts give, against SGLang's own in float32: each rounds once to bfloat16
TOLERANCES = {"attention": 3e-3, "hyper-connections": 4e-3}


@cache
def register() -> None:
    """What SGLang calls in each of its processes. Only one entry point of a name is: another package's is called here."""
    try:
        for other in entry_points(group=GROUP, name=NAME):
            if not other.value.startswith("deepdecode."):
                other.load()()
                log.warning("deepdecode in SGLang: megakernel is off: %s has one", other.value.split(":")[0])
                return
        if not why_off(PLUGIN, MEGAKERNEL):
            from sglang.kernels.plugin_kernels.nvidia import spec  # type: ignore

            spec.register(architecture=ARCHITECTURE, path=f"{__name__}:SPEC")
    except Exception as error:
        log.warning("deepdecode in SGLang: megakernel is off: %s: %s", type(error).__name__, error)


class Steps:
    """What the spec builds: plans by mode and rows alone, so that every rank and every graph of a size decide alike."""

    draft_sampler = None

    def __init__(self, widths: tuple[int, ...]) -> None:
        self.widths = widths

    def summary(self) -> str:
        return "attention, indexer and hyper-connections of deepdecode in SGLang's own forward"

    def plan(self, input_ids: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        from sglang.kernels.plugin_kernels.nvidia.spec import Step  # type: ignore

        rows = len(input_ids)
        return Step(mode="decode", rows=rows) if forward_batch.forward_mode.is_decode() and rows in self.widths else None

    def forward(self, step: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from deepdecode.plugins.sglang_ops import covered

        token = covered.set(True)
        try:
            return original(*args, **kwargs)
        finally:
            covered.reset(token)


def _build(model: Any, hf_config: Any, context: Any) -> Steps:
    return Steps(tuple(width for width in context.widths if width <= MAX_ROWS))


def _model_reasons(model: Any, hf_config: Any) -> list[str]:
    """What the loaded model has that the parts do not cover."""
    from deepdecode.kernels.attention_plan import Case, card_of, supports

    parameter = next(model.parameters())
    reason = supports(Case(1, 1, hf_config.sliding_window, D=hf_config.head_dim), card_of(parameter.device))
    return [f"deepdecode has no kernel: {reason}"] if reason else []


def __getattr__(name: str) -> Any:
    """SPEC, made when SGLang asks for it: it is of SGLang's own class."""
    if name != "SPEC":
        raise AttributeError(name)
    from sglang.kernels.plugin_kernels.nvidia import spec  # type: ignore

    return spec.MegakernelSpec(
        name="deepdecode",
        requires=spec.Requirements(
            isas=frozenset({"sm_120", "sm_121"}),
            tp_sizes=frozenset({1, 2, 4, 8}),
            dtypes=frozenset({"bfloat16"}),
            hf_config={"model_type": "deepseek_v4", "head_dim": 512},
        ),
        # none has been run with it
        features=frozenset(),
        numerics=spec.Numerics(spec.NumericsKind.TOLERANCE, TOLERANCES),
        max_rows=MAX_ROWS,
        build=_build,
        api_version=spec.MEGAKERNEL_API_VERSION,
        model_disable_reasons=_model_reasons,
    )
