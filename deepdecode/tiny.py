"""The embedded model: a tiny V4 in the official checkpoint format.

It has every layer kind of V4-Flash and its head_dim, window and ratios, so that the real kernels apply to it. A trained one
lies in the package's folder (`tools/train_tiny.py embed` puts it there, README.md is its card). Otherwise it is seeded and
built at first use: its weights are random, and what it prints means nothing.
"""

import hashlib
import os
from pathlib import Path

from deepdecode import __version__
from deepdecode.checkpoint import seeded_tensors, write_checkpoint
from deepdecode.config import ModelConfig, Yarn, read_config

FOLDER = Path(__file__).parent / "data" / "tiny"
TOKENIZER = FOLDER / "tokenizer.json"
# whether the weights of the folder are there, or are made from a seed
TRAINED = (FOLDER / "config.json").is_file()
SEED = 4

SEEDED = ModelConfig(
    vocab_size=1024,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=128,
    compress_ratios=(0, 4, 128, 4),
    index_heads=4,
    index_topk=32,
    num_experts=16,
    experts_per_token=2,
    expert_width=256,
    num_hash_layers=1,
    yarn=Yarn(original_max_positions=1024),
    max_positions=16384,
    bos_id=0,
    eos_ids=(1,),
)

CONFIG = read_config(FOLDER) if TRAINED else SEEDED
# another model under the same name would be read as this one
NAME = "tiny-" + hashlib.sha256(f"{__version__} {SEED} {SEEDED}".encode()).hexdigest()[:12]


def tiny_dir() -> Path:
    """The folder of the embedded checkpoint; a seeded one is built if it is not there yet (a second or two).

    Raises:
        ValueError: it is not there and cannot be built where it should be.
    """
    if TRAINED:
        return FOLDER
    named = os.environ.get("DEEPDECODE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "deepdecode"
    try:
        folder = Path(named).expanduser() / NAME
    except RuntimeError:
        raise ValueError("embedded model: DEEPDECODE_CACHE must name a folder where there is no home, got none") from None
    if not (folder / "config.json").is_file():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            write_checkpoint(folder, SEEDED, seeded_tensors(SEEDED, SEED, mtp=True), extra_files=[TOKENIZER])
        except OSError as error:
            # writing is atomic: where two processes build it at once, the second finds the first one's, which is the same
            if not (folder / "config.json").is_file():
                got = error.strerror or error
                raise ValueError(
                    f"embedded model: {folder} must be a folder that can be made, got: {got}; DEEPDECODE_CACHE names another"
                ) from None
    return folder
