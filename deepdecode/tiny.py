"""The embedded model: a tiny V4 that writes Python, in the official checkpoint format; its card lies beside it.

It has every layer kind of V4-Flash and its head_dim, window and ratios, so that the real kernels apply to it. It was trained by
`tools/train_tiny.py`, whose `embed` puts another in its place.
"""

from pathlib import Path

from deepdecode.config import read_config

EMBEDDED = Path(__file__).parent / "data" / "tiny"
TOKENIZER = EMBEDDED / "tokenizer.json"
CONFIG = read_config(EMBEDDED)
