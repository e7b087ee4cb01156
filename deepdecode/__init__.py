"""Fast DeepSeek-V4-Flash decoding on the GPUs that the official kernels leave out."""

__version__ = "0.1.0"
