"""Serve a small DeepSeek-V4 with seeded weights on the CPU by vLLM's engine, and save the log-probabilities it gives.

    python vllm_serve.py OUT [--tp 2] [--short] [--later] [--ngram] [--spoil OP ...]

The tokens are given, not sampled: each step's log-probabilities, of the whole vocabulary, follow the same text in every run.
"""

import argparse
import json
import os
import types
from pathlib import Path

# vLLM asks whether Triton has a backend for CPUs; its interpreter is one. In every process, before Triton and vLLM are imported
os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.backends

triton.backends.backends.setdefault(
    "cpu", types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: True), compiler=None)
)
VOCABULARY, LAYERS, RATIOS = 512, 5, [0, 0, 4, 128, 4]
# less than a window; entries of ratio 128; more entries of ratio 4 than the 512 that are chosen. The steps of a clean run, and
# of one whose results are spoilt
PROMPTS, STEPS, SPOILT = (70, 300, 2180), 12, 4
# prompts that come one after the other
LATER = (2180, 300)
CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "max_position_embeddings": 4096,
    "compress_ratios": RATIOS,
    "num_hash_layers": 1,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "num_nextn_predict_layers": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
}

if os.environ.get("VLLM_BREAK_SIGNATURES"):
    from deepdecode.plugins import sources, vllm

    wrong = sources.Function(vllm._CPU, "DeepseekV4CPUAttention.forward_mqa", ("self", "q"))
    for part in vllm.PLUGIN.parts:
        object.__setattr__(part, "table", (*part.table, wrong))


def tokens(seed, count):
    return torch.randint(2, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def requests(prompts, steps):
    """Prompts, and what is asked of each: log-probabilities of the whole vocabulary, over tokens that are given."""
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": tokens(seed, count)} for seed, count in enumerate(prompts)]
    params = [
        SamplingParams(
            max_tokens=steps, temperature=0, ignore_eos=True, detokenize=False, logprobs=VOCABULARY,
            extra_args={"tokens": tokens(100 + seed, steps)},
        )
        for seed in range(len(prompts))
    ]  # fmt: skip
    return asked, params


def logprobs(outputs, steps):
    """[requests, steps, vocabulary]"""
    out = torch.zeros(len(outputs), steps, VOCABULARY)
    for row, request in enumerate(outputs):
        assert list(request.outputs[0].token_ids) == tokens(100 + row, steps)
        for step, found in enumerate(request.outputs[0].logprobs):
            out[row, step, list(found)] = torch.tensor([value.logprob for value in found.values()])
    return out


def generate(llm, prompts, steps):
    """All prompts at once."""
    llm.reset_prefix_cache()
    return logprobs(llm.generate(*requests(prompts, steps), use_tqdm=False), steps)


def generate_later(llm, prompts, steps):
    """Each prompt comes when the one before it has decoded a token: steps that decode and work on a prompt."""
    llm.reset_prefix_cache()
    engine, done = llm.llm_engine, {}
    waiting = [(str(row), *request) for row, request in enumerate(zip(*requests(prompts, steps), strict=True))]
    while waiting or engine.has_unfinished_requests():
        if waiting:
            engine.add_request(*waiting.pop(0))
        for _ in range(2):
            done |= {output.request_id: output for output in engine.step() if output.finished}
    return logprobs([done[str(row)] for row in range(len(prompts))], steps)


def called(folder):
    """{process.op: the first argument's shape at each call}"""
    return {file.name: file.read_text().split() for file in folder.glob("*.*")}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--later", action="store_true", help="also prompts that come one after the other; one process only")
    parser.add_argument("--short", action="store_true", help="the prompts that no indexer is needed for")
    parser.add_argument("--ngram", action="store_true", help="with a draft of one token, taken from the text")
    parser.add_argument("--spoil", nargs="*", default=[], help="ops whose results are corrupted, one after the other")
    asked = parser.parse_args()
    model = asked.out.parent / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))

    from vllm import LLM

    draft = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 1, "prompt_lookup_min": 1}
    llm = LLM(
        model=str(model), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=4096, max_num_seqs=4,
        max_num_batched_tokens=4096, enforce_eager=True, tensor_parallel_size=asked.tp, block_size=256, max_logprobs=VOCABULARY,
        async_scheduling=False, logits_processors=["vllm_harness:Given"],
        speculative_config=draft if asked.ngram else None,
    )  # fmt: skip
    prompts = PROMPTS[:2] if asked.short else PROMPTS
    found = {"clean": generate(llm, prompts, STEPS)}
    folder = Path(os.environ["VLLM_HARNESS"])
    calls = {"clean": called(folder)}
    if asked.later:
        found["later"] = generate_later(llm, LATER, SPOILT)
        calls["later"] = {name: shapes[len(calls["clean"].get(name, ())) :] for name, shapes in called(folder).items()}
    for op in asked.spoil:
        mark = folder / f"spoil.{op}"
        mark.touch()
        found[op] = generate(llm, prompts, SPOILT)
        mark.unlink()
    torch.save({"logprobs": found, "calls": calls}, asked.out)


if __name__ == "__main__":
    main()
