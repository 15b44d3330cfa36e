# SPDX-License-Identifier: Apache-2.0
"""Looks at losses and gradients before the ranks' are averaged, and at weights after a step that spoilt them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.data.position import Position
from ddpilot.guard.probes.data.prints import tensors_in

_NUM_CANDIDATES = 8
_MAX_NOTED = 64
_MAX_NAMED = 20
_MAX_PENDING = 64


class LossEyes:
    """The part of the data probe that looks for what is not finite.

    On a device the values are looked at once they have arrived, up to a step later: nothing waits for them.
    """

    def __init__(self, notes: Notes, position: Position) -> None:
        self._notes = notes
        self._position = position
        self._number = 0
        self._facts: dict[str, Any] = {}
        self._pending: deque[tuple[torch.Tensor, Any, dict[str, Any], str]] = deque(maxlen=_MAX_PENDING)
        self._num_noted = 0
        self._suspected = 0  # number of the backward since whose step the weights were not looked at
        self._is_spoiled = False
        self._num_spoiled = 0
        self._nodes: list[Any] = []

    def install(self) -> list[Callable[[], None]]:
        """Begin to look; what ends it."""
        stepped = self._notes.safely(self._stepped)
        handle = register_optimizer_step_post_hook(stepped)
        around = self._notes.around
        return [
            handle.remove,
            around(torch.autograd, "backward", before=self._begins),
            around(DistributedDataParallel, "__init__", after=self._made),
            self._let_go,
        ]

    def _let_go(self) -> None:
        while self._nodes:
            self._nodes.pop()[1].remove()

    def _made(self, _: Any, returned: bool, __: Any, model: Any, *___: Any, **____: Any) -> None:
        """Look at one gradient of `model` before it is reduced: of an early layer, which what is not finite reaches."""
        candidates = [one for one in model.module.parameters() if one.requires_grad] if returned else []
        if not candidates:
            return
        smallest = min(candidates[:_NUM_CANDIDATES], key=lambda one: one.numel())
        with torch.enable_grad():
            node: Any = smallest.expand_as(smallest).grad_fn
        node = node.next_functions[0][0]
        self._nodes.append((node, node.register_prehook(self._notes.safely(self._see_gradient))))

    def _begins(self, tensors: Any, *_: Any, **__: Any) -> None:
        self._poll()
        self._number += 1
        used = self._position.used
        self._facts = {"backward": self._number}
        if used is not None:
            self._facts |= {**used.of.key, "batch": used.batch, "indices": used.indices}
        for _name, loss in tensors_in(tensors):
            if loss.numel() == 1 and loss.is_floating_point():
                self._look(loss.detach(), "loss")

    def _see_gradient(self, gradients: Iterable[torch.Tensor | None]) -> None:
        for gradient in gradients:
            if gradient is not None and gradient.layout is torch.strided:
                self._look(gradient.detach().sum(), "gradient")

    def _look(self, value: torch.Tensor, what: str) -> None:
        if value.device.type == "cpu":
            self._judge(value.item(), self._facts, what)
        elif value.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            arrived = torch.empty((), dtype=value.dtype, pin_memory=True)
            arrived.copy_(value, non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._pending.append((arrived, event, self._facts, what))

    def _poll(self) -> None:
        while self._pending and self._pending[0][1].query():
            value, _, facts, what = self._pending.popleft()
            self._judge(value.item(), facts, what)

    def _judge(self, value: float, facts: dict[str, Any], what: str) -> None:
        if math.isfinite(value):
            return
        self._suspected = facts["backward"]
        if self._is_spoiled or self._num_noted >= _MAX_NOTED or facts.get("noted"):
            return
        facts["noted"] = True
        self._num_noted += 1
        known = {name: fact for name, fact in facts.items() if name != "noted"}
        # A thread of the backward engine has no line of the user's: then that of the step is shown.
        loss = str(value) if what == "loss" else ""
        self._notes.write("not_finite", **known, loss=loss, site=self._notes.site())

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._poll()
        if not self._suspected:
            return
        bad = [one for group in optimizer.param_groups for one in group["params"] if not _is_finite(one)]
        if bad and not self._is_spoiled:
            self._num_spoiled += 1
            names = _name_parameters(self._position.models, bad[:_MAX_NAMED])
            more = [f"{len(bad) - _MAX_NAMED} more"] if len(bad) > _MAX_NAMED else []
            facts = {"backward": self._suspected, "time": self._num_spoiled}
            self._notes.write("spoiled", **facts, parameters=names + more, site=self._notes.site())
        self._is_spoiled = bool(bad)
        self._suspected = 0
        if not bad:
            self._num_noted = 0


def _is_finite(parameter: torch.Tensor) -> bool:
    if not parameter.is_floating_point() or parameter.grad is None:
        return True
    return bool(torch.isfinite(parameter.detach()).all())


def _module_of(model: Any) -> nn.Module:
    module: nn.Module = model.module
    return module


def _name_parameters(models: Iterable[nn.Module], parameters: list[torch.Tensor]) -> list[str]:
    names = {id(one): name for model in models for name, one in _module_of(model).named_parameters()}
    return [names.get(id(one), f"one of shape {tuple(one.shape)}") for one in parameters]
