"""Tensor parallelism on one machine: `torchrun --nproc-per-node 8 -m deepdecode generate ...`."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from deepdecode.model import ALONE, Collectives


@dataclass(frozen=True)
class Rank:
    """This process's place in its tensor-parallel group."""

    rank: int
    size: int
    collectives: Collectives


def join(device: torch.device) -> Rank:
    """Join the group that torchrun's environment names (NCCL on GPUs, gloo on CPUs); alone where it names none.

    Raises:
        ValueError: the environment names no rank of a group.
    """
    size = _number("WORLD_SIZE", 1, 1 << 20, default="1")
    rank = _number("RANK", 0, size - 1, default="0")
    if size == 1:
        return Rank(0, 1, ALONE)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=size)
    return Rank(rank, size, Collectives(_all_reduce, _all_gather))


def _number(name: str, low: int, high: int, default: str) -> int:
    text = os.environ.get(name, default)
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ValueError(f"distributed: {name} must be a number from {low} to {high}, got {text!r}")
    return int(text)


def leave() -> None:
    """Leave the group, if one was joined."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    # the sum over ranks of partial products; in float32, as the official code does
    total = x.float() if x.dtype is torch.bfloat16 else x.clone()
    dist.all_reduce(total)
    return total.to(x.dtype)


def _all_gather(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=-1)
