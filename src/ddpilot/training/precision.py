# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: autocast, the gradient scaler that fp16 needs, and steps that know of it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from ddpilot.errors import LoopError

Kind = Literal["fp32", "bf16", "fp16"]
"""fp32 leaves every dtype as it is."""


class _Scaler(torch.amp.GradScaler):
    """Gives gradients their true size where losses were not multiplied by the number of ranks, as DDP's mean takes.

    In 16 bits that factor would make every rank overflow sooner than one rank alone does; float32 has room for it.
    """

    def __init__(self, device_type: str, world_size: int) -> None:
        super().__init__(device_type)
        self._world_size = world_size

    def _unscale_grads_(self, optimizer: Optimizer, inv_scale: torch.Tensor, *more: Any) -> dict[Any, Any]:
        return super()._unscale_grads_(optimizer, inv_scale * self._world_size, *more)


class Precision:
    """Forward passes in `kind`; "fp16" scales losses, and skips an update whose gradients overflowed.

    Gradients are the same on all ranks when they are looked at, so all ranks skip alike. With "fp16" a loss is weighted
    by the rank's part of the samples, without the number of ranks. Raises LoopError for another `kind`.
    """

    def __init__(self, kind: Kind, device: torch.device, world_size: int = 1) -> None:
        if kind not in ("fp32", "bf16", "fp16"):
            raise LoopError("making a Loop", found=f"`precision` is {kind!r}", fix="Use 'fp32', 'bf16' or 'fp16'.")
        self._dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
        self._device = device
        self.scaler = _Scaler(device.type, world_size) if kind == "fp16" else None
        """None where nothing is scaled."""
        self._unscaled: set[int] = set()

    @property
    def is_mixed(self) -> bool:
        """Does `autocast` change anything?"""
        return self._dtype is not None

    def autocast(self) -> AbstractContextManager[object]:
        """Forward passes and losses belong in here, backward passes do not."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)

    def unscale(self, parameters: Iterable[torch.Tensor], optimizers: Iterable[Optimizer]) -> None:
        """Give the gradients of `parameters` their true size, those of the rest of their optimizers too. Once."""
        if self.scaler is None:
            return
        clipped = {id(parameter) for parameter in parameters}
        for optimizer in optimizers:
            owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if owned & clipped and id(optimizer) not in self._unscaled:
                self.scaler.unscale_(optimizer)
                self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer) -> bool:
        """Update the weights; False where fp16's gradients overflowed and nothing was updated."""
        if self.scaler is None:
            optimizer.step()
            return True
        if id(optimizer) not in self._unscaled:  # fused ones would do so by themselves, without the number of ranks
            self.scaler.unscale_(optimizer)
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        self._unscaled.discard(id(optimizer))
        return self.scaler.get_scale() >= before
