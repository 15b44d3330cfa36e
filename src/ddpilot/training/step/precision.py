# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: autocast, and loss scaling with skipped updates for fp16."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ddpilot.errors import LoopError
from ddpilot.training.models.registry import parameters_of

Kind = Literal["fp32", "tf32", "bf16", "bf16-true", "fp16"]
"""fp32 leaves all dtypes unchanged; tf32 too, and lets CUDA devices multiply in TensorFloat-32."""


class _Scaler(torch.amp.GradScaler):
    """A GradScaler that multiplies by world_size when it unscales, instead of scaling each loss for DDP's mean.

    In 16 bits, that factor in the loss would make ranks overflow sooner than a single process; float32 has room for it.
    """

    def __init__(self, device_type: str, world_size: int) -> None:
        super().__init__(device_type)
        self._world_size = world_size
        self._numbers = count(1)

    def _unscale_grads_(self, optimizer: Optimizer, inv_scale: torch.Tensor, *more: Any) -> dict[Any, Any]:
        return super()._unscale_grads_(optimizer, inv_scale * self._world_size, *more)

    def unscale_once(self, optimizer: Optimizer) -> bool:
        """Unscale the gradients of `optimizer`, once per step. Returns False if it has no gradients."""
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED:
            # A second step before `update`, which still has to consider whether the first one overflowed.
            self._per_optimizer_states[-next(self._numbers)] = self._per_optimizer_states.pop(id(optimizer))
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            # A fused optimizer would unscale in its step, without the factor world_size.
            self.unscale_(optimizer)
        if self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
            return True
        del self._per_optimizer_states[id(optimizer)]
        return False

    def note_norm(self, optimizer: Optimizer, norm: torch.Tensor) -> None:
        """Skip the next step of `optimizer` if the `norm` (shape ()) of unscaled gradients is not finite.

        Does not wait for the device.
        """
        if id(optimizer) in self._per_optimizer_states:
            is_bad = ~torch.isfinite(norm.detach())
            for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                found.logical_or_(is_bad.to(found.device, non_blocking=True))

    @property
    def has_unscaled(self) -> bool:
        """True if gradients were unscaled since the last `update`."""
        return any(state["found_inf_per_device"] for state in self._per_optimizer_states.values())

    def step_if_finite(self, optimizer: Optimizer) -> bool:
        """Step with gradients that are already unscaled. True if the step was made.

        On an accelerator it waits for the device once, as torch's own `step` does.
        """
        state = self._per_optimizer_states[id(optimizer)]
        state["stage"] = OptState.STEPPED
        if any(found.item() for found in state["found_inf_per_device"].values()):
            return False
        optimizer.step()
        return True


class Precision:
    """Runs forward passes in `kind`; with "fp16" it scales losses and skips updates whose gradients overflowed.

    Gradients are checked after the all-reduce, so all ranks skip alike. With "fp16" a loss is weighted by the rank's
    share of the samples, without the factor world_size. The scale changes only between updates (`settle`): several
    optimizers may step on the gradients of one backward pass. Raises LoopError for an unknown `kind`.
    """

    def __init__(self, kind: Kind, device: torch.device, world_size: int = 1) -> None:
        if kind not in get_args(Kind):
            fix = f"Use {', '.join(map(repr, get_args(Kind)[:-1]))} or {get_args(Kind)[-1]!r}."
            raise LoopError("making a Loop", found=f"`precision` is {kind!r}", fix=fix)
        self._dtype = {"bf16": torch.bfloat16, "bf16-true": torch.bfloat16, "fp16": torch.float16}.get(kind)
        self._casts_weights = kind == "bf16-true"
        if kind == "tf32" and device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        self._device = device
        self.scaler = _Scaler(device.type, world_size) if kind == "fp16" else None
        """None unless `kind` is "fp16"."""
        self._has_overflowed = False

    @property
    def is_mixed(self) -> bool:
        """True if `autocast` has an effect."""
        return self._dtype is not None

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context for forward passes and losses; backward passes run outside of it."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)

    def cast_weights(self, model: nn.Module) -> None:
        """With "bf16-true", cast the float32 parameters of `model` to bfloat16, in place; BatchNorm keeps float32."""
        for layer in model.modules() if self._casts_weights else ():
            if not isinstance(layer, _BatchNorm):
                for parameter in layer.parameters(recurse=False):
                    if parameter.dtype is torch.float32:
                        parameter.data = parameter.data.to(torch.bfloat16)

    def unscale(self, parameters: Iterable[torch.Tensor], optimizers: Iterable[Optimizer]) -> None:
        """Unscale all gradients of the optimizers that hold any of `parameters`, once."""
        if self.scaler is not None:
            for optimizer in _holding(parameters, optimizers):
                self.scaler.unscale_once(optimizer)

    def note_norm(
        self, parameters: Iterable[torch.Tensor], optimizers: Iterable[Optimizer], norm: torch.Tensor
    ) -> None:
        """Skip the next steps of the optimizers that hold any of `parameters` if their `norm` is not finite.

        Clipping by it spoils all of these gradients, also those of an optimizer whose own gradients did not overflow.
        Call it after `unscale`. Does not wait for the device.
        """
        if self.scaler is not None:
            for optimizer in _holding(parameters, optimizers):
                self.scaler.note_norm(optimizer, norm)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Update the weights. Returns False, without an update, if fp16 gradients overflowed.

        `closure`: for optimizers that require one; never with "fp16".
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
        """Update the scale from the unscaled gradients, once per update, before the next backward pass.

        Does nothing if one of the optimizers `waiting` has gradients, which have the current scale.
        """
        if self.scaler is None or not self.scaler.has_unscaled:
            return
        if any(parameter.grad is not None for optimizer in waiting for parameter in parameters_of(optimizer)):
            return
        self.scaler.update()
        self._has_overflowed = False

    def settle_overflow(self, waiting: Iterable[Optimizer]) -> None:
        """Call `settle` within a batch if a step has overflowed: a further backward pass needs a smaller scale."""
        if self._has_overflowed:
            self.settle(waiting)


def _holding(parameters: Iterable[torch.Tensor], optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return those of `optimizers` that hold any of `parameters`."""
    ids = {id(parameter) for parameter in parameters}
    return [optimizer for optimizer in optimizers if not ids.isdisjoint(map(id, parameters_of(optimizer)))]
