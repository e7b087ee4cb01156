"""Checkpoints: official safetensors in, the weights that ops take out, and the way back for tests and demonstrations."""

from deepdecode.checkpoint.container import CheckpointError
from deepdecode.checkpoint.load import expect_draft, load_draft, load_model
from deepdecode.checkpoint.open import Checkpoint, open_checkpoint
from deepdecode.checkpoint.write import seeded_model, seeded_tensors, write_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "expect_draft",
    "load_draft",
    "load_model",
    "open_checkpoint",
    "seeded_model",
    "seeded_tensors",
    "write_checkpoint",
]
