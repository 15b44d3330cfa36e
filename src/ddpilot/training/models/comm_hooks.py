# SPDX-License-Identifier: Apache-2.0
"""Compresses gradients to bf16 or fp16 for the all-reduce, with torch's own DDP communication hooks."""

# No postponed annotations here: DDP compares the annotations of a hook with the classes themselves.

from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddpilot.errors import LoopError


def check_compressible(model: nn.Module, comm: str, rank: int) -> None:
    """Raise LoopError if `model` has float64 or complex parameters to train, or layers with sparse gradients."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float64, torch.complex64, torch.complex128):
            found = f"parameter {name} is {parameter.dtype}"
            raise _refuse(comm, found, "Leave `comm` out, or make the model float32.", rank)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            found = f"layer {name or type(layer).__name__} has sparse gradients"
            raise _refuse(comm, found, "Make it with sparse=False, or leave `comm` out.", rank)


def compress(model: DistributedDataParallel, comm: Literal["bf16", "fp16"]) -> None:
    """All-reduce the gradients of `model` in the dtype `comm`.

    They are summed in that dtype and converted back to their own.
    """
    # With state None, the hook uses the current default process group, also after that was rebuilt.
    model.register_comm_hook(None, {"bf16": _to_bf16, "fp16": default_hooks.fp16_compress_hook}[comm])


def is_fp16(model: DistributedDataParallel) -> bool:
    """True if the gradients of `model` are all-reduced in fp16."""
    return any(hook is default_hooks.fp16_compress_hook for hook, _ in model._comm_hooks)


def _to_bf16(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    # DDP rejects bf16_compress_hook itself without CUDA, although gloo can sum bfloat16: it tests the hook's name.
    return default_hooks.bf16_compress_hook(state, bucket)  # type: ignore[arg-type]


def _refuse(comm: str, found: str, fix: str, rank: int) -> LoopError:
    return LoopError(f'preparing a model with `comm="{comm}"`', found=found, fix=fix, rank=rank)
