# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: autocast, the gradient scaler that fp16 needs, and steps that know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any, Literal

import torch
from torch.amp.grad_scaler import OptState
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
        self._numbers = count(1)

    def _unscale_grads_(self, optimizer: Optimizer, inv_scale: torch.Tensor, *more: Any) -> dict[Any, Any]:
        return super()._unscale_grads_(optimizer, inv_scale * self._world_size, *more)

    def unscale_once(self, optimizer: Optimizer) -> bool:
        """Give the gradients of `optimizer` their true size, once per step; return False if it has no gradients."""
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED:
            # Its next step before `update`, which still takes into account whether the step before overflowed.
            self._per_optimizer_states[-next(self._numbers)] = self._per_optimizer_states.pop(id(optimizer))
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            # A fused optimizer would do this in its step, without the number of ranks.
            self.unscale_(optimizer)
        if self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
            return True
        del self._per_optimizer_states[id(optimizer)]
        return False

    @property
    def has_looked(self) -> bool:
        """True if gradients were unscaled since the last `update`."""
        return any(state["found_inf_per_device"] for state in self._per_optimizer_states.values())

    def step_if_finite(self, optimizer: Optimizer) -> bool:
        """`step` for gradients that have their true size; return whether it was made.

        On an accelerator: waits once, as torch's own `step` does.
        """
        state = self._per_optimizer_states[id(optimizer)]
        state["stage"] = OptState.STEPPED
        if any(found.item() for found in state["found_inf_per_device"].values()):
            return False
        optimizer.step()
        return True


class Precision:
    """Forward passes in `kind`; "fp16" scales losses, and skips an update whose gradients overflowed.

    Gradients are the same on all ranks when they are looked at, so all ranks skip alike. With "fp16" a loss is weighted
    by the rank's part of the samples, without the number of ranks. The scale changes between updates only (`settle`):
    several optimizers may step on gradients of one backward pass. Raises LoopError for another `kind`.
    """

    def __init__(self, kind: Kind, device: torch.device, world_size: int = 1) -> None:
        if kind not in ("fp32", "bf16", "fp16"):
            raise LoopError("making a Loop", found=f"`precision` is {kind!r}", fix="Use 'fp32', 'bf16' or 'fp16'.")
        self._dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
        self._device = device
        self.scaler = _Scaler(device.type, world_size) if kind == "fp16" else None
        """None where nothing is scaled."""
        self._has_overflowed = False

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
            if not clipped.isdisjoint(map(id, parameters_of(optimizer))):
                self.scaler.unscale_once(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Update the weights; False where fp16's gradients overflowed and nothing was updated.

        `closure`: for optimizers that ask for it; never with "fp16".
        """
        if closure is not None:
            optimizer.step(closure)
            return True
        if self.scaler is None or not self.scaler.unscale_once(optimizer):
            optimizer.step()
            return True
        is_done = self.scaler.step_if_finite(optimizer)
        self._has_overflowed |= not is_done
        return is_done

    def settle(self, waiting: Iterable[Optimizer] = ()) -> None:
        """Let the scale follow from the gradients that were unscaled, once per update, before the next backward pass.

        Does nothing if one of the optimizers `waiting` has gradients: those are of the present scale.
        """
        if self.scaler is None or not self.scaler.has_looked:
            return
        if any(parameter.grad is not None for optimizer in waiting for parameter in parameters_of(optimizer)):
            return
        self.scaler.update()
        self._has_overflowed = False

    def settle_overflow(self, waiting: Iterable[Optimizer]) -> None:
        """`settle` in the middle of a batch, if a step has overflowed: a further pass needs a smaller scale."""
        if self._has_overflowed:
            self.settle(waiting)


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """All parameters of `optimizer`."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
