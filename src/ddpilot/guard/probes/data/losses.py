# SPDX-License-Identifier: Apache-2.0
"""Observe losses and gradients before they are reduced, and weights after a step with non-finite gradients."""

from __future__ import annotations

import cmath
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ddpilot.guard.notes import BackwardNote, BatchKey, NotFiniteNote, Site, SpoiledNote
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.data.position import LoadedBatch, Position
from ddpilot.guard.probes.process_groups import GroupGenerations, find_world
from ddpilot.guard.probes.tensors import tensors_in
from ddpilot.record.accelerator import HostCopies, HostCopy, is_capturing

_NUM_CANDIDATES = 8
_MAX_NOTED = 64
_MAX_NAMED = 20
_MAX_PENDING = 256
"""CUDA has the host wait once about 1024 launches are queued; a step takes far more than 8, and has two values."""
_MAX_GRADIENTS = 64
_MAX_KEPT = 1 << 16
"""Maximum number of elements of a gradient that is kept until it is checked: holding a reference makes torch copy
it."""


@dataclass(slots=True)
class _Backward:
    """One backward pass: its number, the batch of the last forward before it, and its line."""

    number: BackwardNote
    used: LoadedBatch | None
    site: Site
    is_noted: bool = False
    is_skipped: bool = False

    def note(self, loss: str) -> NotFiniteNote:
        """Return the note for a `loss` that is not finite, or for a gradient if `loss` is empty."""
        used = self.used
        key: BatchKey = used.key if used is not None else {}
        indices = used.indices if used is not None else ()
        return NotFiniteNote(**self.number, loss=loss, indices=indices, site=self.site, **key)


class LossObserver:
    """The part of the data probe that looks for non-finite values.

    Values on a device are checked without waiting, in a later step or when the probe stops. At most 256 are in
    flight; further ones are not checked, which is noted.
    """

    def __init__(self, notes: Notes, position: Position) -> None:
        self._notes = notes
        self._position = position
        self._generations = GroupGenerations()
        self._training = 0  # number of models of all ranks made in this generation
        self._number = 0  # number of this backward since the last of them was made
        self._used: LoadedBatch | None = None
        self._backward: _Backward | None = None  # created on demand, which is rare on the CPU
        self._gradients: deque[Any] = deque(maxlen=_MAX_GRADIENTS)
        self._copies = HostCopies(max_free=_MAX_PENDING)
        self._pending: deque[tuple[HostCopy, _Backward, str]] = deque()
        self._num_noted = 0
        self._has_device_model = self._has_device_values = False
        self._suspected: BackwardNote | None = None  # the backward whose step's weights have not been checked
        self._spoiled: Any = WeakTensorKeyDictionary()  # the parameters that a step has made non-finite
        self._is_spoiled = False  # whatever is not finite now may be a consequence of what has been reported
        self._handles: list[Any] = []

    def install(self) -> list[Callable[[], None]]:
        stepped = self._notes.safely(self._stepped)
        handle = register_optimizer_step_post_hook(stepped)
        around = self._notes.around
        return [
            handle.remove,
            around(torch.autograd, "backward", before=self._begins, after=self._poll),
            around(DistributedDataParallel, "__init__", returned=self._made),
            self._let_go,
            self._notes.safely(self._read_last),  # runs first: the list is called from its end
        ]

    def _read_last(self) -> None:
        with contextlib.suppress(RuntimeError):  # the device has failed, as the program's own error says
            self._poll()
            if self._has_device_values and not self._pending:
                self._notes.write("checked", self._present_number())

    def _let_go(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _made(self, _: Any, __: Any, model: Any, *___: Any, **____: Any) -> None:
        """Check one gradient of `model` before it is reduced: an early layer's, which non-finite values reach."""
        self._poll()
        if self._is_spoiled:  # as may be what was read now; the weights of the new training are others
            self._is_spoiled, self._suspected = False, None
        self._num_noted = 0
        self._begin_count()
        if find_world() is not None and model.process_group.size() == find_world().size():
            self._training, self._number = self._training + 1, 0
        ignored = model.parameters_to_ignore
        candidates = [one for name, one in model.module.named_parameters() if one.requires_grad and name not in ignored]
        if not candidates:
            return
        smallest = min(candidates[:_NUM_CANDIDATES], key=lambda one: one.numel())
        with torch.enable_grad():
            node: Any = smallest.expand_as(smallest).grad_fn
        node = node.next_functions[0][0]
        self._has_device_model |= not smallest.is_cpu
        # On the CPU it is kept and checked after the backward, so that no Python code runs between two layers.
        keeps = smallest.device.type == "cpu" and smallest.numel() <= _MAX_KEPT
        hook = self._gradients.append if keeps else self._notes.safely(self._see_gradient)
        # DDP holds the node, which holds the parameter. Handles of freed nodes are dropped.
        self._handles = [one for one in self._handles if one.hooks_dict_ref() is not None]
        self._handles.append(node.register_prehook(hook))

    def _begins(self, tensors: Any, *_: Any, **__: Any) -> None:
        if self._gradients or self._pending:
            self._poll()
        self._begin_count()
        self._number += 1
        self._used, self._backward = self._position.used, None
        if self._has_device_model:  # the engine's thread computes the gradients, with no line of the user on its stack
            self._present()
        for loss in (tensors,) if isinstance(tensors, torch.Tensor) else [one for _, one in tensors_in(tensors)]:
            if loss.numel() == 1 and loss.is_floating_point():
                # Reading the device type takes as long as everything else here.
                if not loss.is_cpu:
                    self._look(loss, "loss")
                elif not math.isfinite(value := loss.item()):
                    self._note(value, self._present(), "loss")

    def _begin_count(self) -> None:
        """Count from 0 if the default process group has changed, as all of its ranks do."""
        if self._generations.has_changed():
            self._training = self._number = 0

    def _see_gradient(self, gradients: Iterable[torch.Tensor | None]) -> None:
        for gradient in gradients:
            if gradient is not None and gradient.layout is torch.strided:
                if not gradient.is_cpu:
                    self._look(gradient, "gradient")
                elif not _is_finite(gradient):
                    self._note(math.nan, self._present(), "gradient")

    def _look(self, tensor: torch.Tensor, what: str) -> None:
        """Begin to copy the sum of `tensor`, on a device, to the host."""
        self._has_device_values = True
        if len(self._pending) >= _MAX_PENDING:
            self._skip(self._present())
        elif not is_capturing():  # the sum would become part of the user's graph
            copy = self._copies.begin(tensor if tensor.numel() == 1 else tensor.sum())
            if copy is not None:
                self._pending.append((copy, self._present(), what))

    def _skip(self, backward: _Backward) -> None:
        """Note that a value of `backward` is not checked."""
        if not backward.is_skipped:
            backward.is_skipped = True
            self._notes.write("unchecked", backward.number)

    def _poll(self, *_: Any, **__: Any) -> None:
        """Check gradients that were kept and values that have arrived."""
        while self._gradients:
            self._see_gradient(self._gradients.popleft())
        while self._pending and self._pending[0][0].has_arrived():
            copy, backward, what = self._pending.popleft()
            number = copy.numbers.item()
            copy.release()
            if not math.isfinite(number):
                self._note(number, backward, what)

    def _present(self) -> _Backward:
        if self._backward is None:
            self._backward = _Backward(self._present_number(), self._used, self._notes.site())
        return self._backward

    def _present_number(self) -> BackwardNote:
        return {"generation": self._generations.name, "training": self._training, "backward": self._number}

    def _note(self, value: float, backward: _Backward, what: str) -> None:
        if self._suspected is None or self._num_noted < _MAX_NOTED:
            self._suspected = backward.number
        if self._is_spoiled or self._num_noted >= _MAX_NOTED or backward.is_noted:
            return
        backward.is_noted = True
        self._num_noted += 1
        self._notes.write("not_finite", backward.note(str(value) if what == "loss" else ""))

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._gradients or self._pending:
            self._poll()
        if not (self._suspected or self._spoiled) or is_capturing():
            return
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if not self._suspected and not any(one in self._spoiled for one in parameters):
            self._is_spoiled = False
            return
        bad = _find_not_finite(parameters)
        new = [one for one in bad if one not in self._spoiled]
        if new and not self._is_spoiled:
            self._note_spoiled(new)
        if new or not bad:
            self._num_noted = 0
        for one in parameters:
            self._spoiled.pop(one, None)
        for one in bad:
            self._spoiled[one] = None
        self._is_spoiled = bool(bad)
        self._suspected = None

    def _note_spoiled(self, parameters: list[torch.Tensor]) -> None:
        owners: dict[int, tuple[str, str]] = {}  # name in its model, and the model's group
        for known in self._position.models.values():
            if (model := known.find()) is not None:
                owners.update((id(one), (name, known.group)) for name, one in model.module.named_parameters())
        names = [owners.get(id(one), (f"one of shape {tuple(one.shape)}",))[0] for one in parameters[:_MAX_NAMED]]
        more = [f"{len(parameters) - _MAX_NAMED} more"] if len(parameters) > _MAX_NAMED else []
        note = SpoiledNote(
            **(self._suspected or self._present_number()),
            parameters=names + more,
            device=next((one.device.type for one in parameters if not one.is_cpu), "cpu"),
            group=next((owners[id(one)][1] for one in parameters if id(one) in owners), ""),
            site=self._notes.site(),
        )
        self._notes.write("spoiled", note)


def _find_not_finite(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of `parameters` with gradients that are not finite; synchronizes once per device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for one in parameters:
        # Of a DTensor, the search would be a collective.
        if one.is_floating_point() and type(one.grad) is torch.Tensor:
            by_device.setdefault(one.device, []).append(one)
    bad = []
    for trained in by_device.values():
        are_finite = torch.stack([torch.isfinite(one.detach()).all() for one in trained]).tolist()
        bad += [one for one, is_finite_one in zip(trained, are_finite, strict=True) if not is_finite_one]
    return bad


def _is_finite(gradient: torch.Tensor) -> bool:
    """True if all elements of `gradient`, on the CPU, are finite."""
    # A finite sum takes less than half of the time of `isfinite`, of which only a sum that overflows has need.
    return cmath.isfinite(gradient.sum().item()) or bool(torch.isfinite(gradient).all())
