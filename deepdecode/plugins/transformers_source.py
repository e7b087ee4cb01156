"""What the transformers plug-in expects of transformers' source, and what it tells of itself, without importing torch."""

from deepdecode.plugins.report import Part, Plugin
from deepdecode.plugins.sources import Code

MODULE = "transformers.models.deepseek_v4.modeling_deepseek_v4"
FILE = "models/deepseek_v4/modeling_deepseek_v4.py"
SINCE = (5, 24)
TESTED = f"transformers {SINCE[0]}.{SINCE[1]}"
_ATTENTION = ("module", "query", "key", "value", "attention_mask", "scaling", "dropout", "**kwargs")
_ATTENTION_IN = ("self", "hidden_states", "position_embeddings", "position_ids", "attention_mask", "cache", "**kwargs")
# what is replaced, and the caller of the attention function
EXPECTED = (
    Code(FILE, "eager_attention_forward", _ATTENTION, since=TESTED, digest="cf5a0ba9f586c843"),
    Code(FILE, "DeepseekV4Attention.forward", _ATTENTION_IN, since=TESTED, digest="65e9ee29589a58dc"),
    Code(
        FILE,
        "DeepseekV4DecoderLayer.forward",
        ("self", "hidden_states", "input_ids", "**kwargs"),
        since=TESTED,
        digest="d34a0c0d77573eb2",
    ),
    Code(FILE, "DeepseekV4HyperConnection.forward", ("self", "hidden_streams"), since=TESTED, digest="ee0f5fee06d628d6"),
    Code(FILE, "DeepseekV4HyperHead.forward", ("self", "x"), since=TESTED, digest="484f19534a67bb20"),
    Code(
        FILE,
        "DeepseekV4Experts.forward",
        ("self", "hidden_states", "top_k_index", "top_k_weights"),
        since=TESTED,
        digest="8b8ed631607627d8",
    ),
    Code(FILE, "DeepseekV4Experts._apply_gate", ("self", "gate_up"), since=TESTED, digest="c63c8413442c34d8"),
    Code(FILE, "DeepseekV4RMSNorm.forward", ("self", "hidden_states"), since=TESTED, digest="198ff285b16db4cc"),
    Code(FILE, "DeepseekV4UnweightedRMSNorm.forward", ("self", "x"), since=TESTED, digest="7999676afb1423b8"),
)

# all or nothing: each part needs the whole table
_OPS = {
    "attention": ("eager_attention_forward",),
    "mhc": ("DeepseekV4DecoderLayer.forward", "DeepseekV4HyperConnection.forward", "DeepseekV4HyperHead.forward"),
    "moe": ("DeepseekV4Experts.forward",),
    "norm": ("DeepseekV4RMSNorm.forward", "DeepseekV4UnweightedRMSNorm.forward"),
}
PLUGIN = Plugin(
    engine="transformers",
    tested="5.24.0",
    parts=tuple(
        Part(op, op, tuple(f"{MODULE}.{name}" for name in names), EXPECTED, default=True) for op, names in _OPS.items()
    ),
    call="deepdecode.plugins.transformers.enable(model)",
    since=SINCE,
)
