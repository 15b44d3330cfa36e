# SPDX-License-Identifier: Apache-2.0
"""Observe what the program itself reduces over the ranks: numbers after an evaluation, and tensors with a graph."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from numbers import Real
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddpilot.guard.notes import CollectedNote, CollectiveNote, OnGraphNote
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.caller_source import is_averaged, is_scaled_later
from ddpilot.guard.probes.data.position import Pass, Position
from ddpilot.guard.probes.tensors import tensors_in
from ddpilot.record.accelerator import HostCopies, HostCopy

_REDUCING = ("all_reduce", "reduce", "all_gather", "gather", "all_gather_into_tensor", "reduce_scatter_tensor")
_OF_OBJECTS = {"all_gather_object": (1, 0, "object_list"), "gather_object": (0, 1, "object_gather_list")}
"""Position of the object and of the list in each function, and name of the list's parameter."""
_GATHERING = {
    "all_gather": (0, "tensor_list"),
    "gather": (1, "gather_list"),
    "all_gather_into_tensor": (0, "output_tensor"),
}
"""Position of the output in each function, and name of its parameter."""
_MAX_COLLECTED = 16
_MAX_NAMED = 8
_MAX_NODES = 64
_MAX_DEPTH = 3
_MAX_NOTED = 8
_BUSY_S = 0.5
"""Seconds to wait at the end for a number from a device."""
_MARK = "ddpilot_backward"
_NUM_ALL_MARKED, _MARK_EVERY = 16, 8
"""The first 16 backwards are marked, later ones every 8th, until a tensor with a graph is reduced: a mark costs time in
every step, and programs that accumulate losses with their graphs mostly start early."""


class ReductionObserver:
    """The part of the data probe that observes collectives which the program calls through torch.distributed."""

    def __init__(self, notes: Notes, position: Position) -> None:
        self._notes = notes
        self._position = position
        self._backward = 0
        self._marks_all = False
        self._marked: deque[tuple[ReferenceType[torch.Tensor], CollectiveNote]] = deque(maxlen=8)
        self._num_collected: tuple[Pass | None, int] = (None, 0)
        self._num_noted = 0
        self._copies = HostCopies()
        self._arriving: deque[tuple[HostCopy | None, CollectedNote]] = deque()
        self._is_within = False  # an object collective, which consists of other collectives

    def install(self) -> list[Callable[[], None]]:
        around = self._notes.around
        names = [name for name in _REDUCING if hasattr(dist, name)]
        undo = [around(dist, name, before=partial(self._collect, name), aliases=(distributed_c10d,)) for name in names]
        for name in _OF_OBJECTS:
            begins = partial(self._collect_object, name)
            undo.append(around(dist, name, before=begins, after=self._ends, aliases=(distributed_c10d,)))
        return [*undo, around(torch.autograd, "backward", before=self._begins), self._write_all]

    def _collect_object(self, name: str, *args: Any, **kwargs: Any) -> None:
        at, position, keyword = _OF_OBJECTS[name]
        self._is_within = True
        found = self._position.evaluated
        if found is None or not self._counts(found):
            return
        values = _numbers_of(args[at] if len(args) > at else kwargs.get("obj"))
        frame = self._notes.user_frame()
        averages = values != [None] and frame is not None and is_averaged(frame, name, position, keyword)
        note = self._describe(name, "", found, averages=averages)
        for value in values:
            self._note({**note, "numel": int(value is not None), "value": value})

    def _ends(self, *_: Any, **__: Any) -> None:
        self._is_within = False

    def _collect(self, name: str, *args: Any, **kwargs: Any) -> None:
        if self._is_within:
            return
        self._write_arrived()
        at = 1 if name in ("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor") else 0
        given = [*args, *kwargs.values()]
        tensor = next((one for one in given[at:] if isinstance(one, torch.Tensor)), None)
        if tensor is None:
            return
        if self._position.evaluated is not None:
            reduce_op = next((one for one in given if isinstance(one, dist.ReduceOp | dist.ReduceOp.RedOpType)), None)
            self._note_number(name, tensor, _name_of(reduce_op) if "reduce" in name else "")
        if tensor.grad_fn is not None and torch.is_grad_enabled() and self._num_noted < _MAX_NOTED:
            self._note_graph(name, tensor)

    def _note_number(self, name: str, tensor: torch.Tensor, reduce_op: str) -> None:
        found = self._position.evaluated
        if found is None or not self._counts(found) or tensor.is_complex():
            return
        is_number = tensor.numel() == 1
        averages = not is_number or self._averages(name, reduce_op)
        note = self._describe(name, reduce_op, found, averages=averages)
        note["numel"] = tensor.numel()
        note["value"] = float(tensor.detach()) if is_number and tensor.is_cpu else None
        self._note(note, self._copies.begin(tensor) if is_number and not tensor.is_cpu else None)

    def _describe(self, name: str, reduce_op: str, found: Pass, *, averages: bool) -> CollectedNote:
        """Return the note for `name`, called after the evaluation `found`, as yet without a number."""
        return CollectedNote(
            **found.key,
            op=name,
            reduce=reduce_op,
            averages=averages,
            samples=found.num_samples,
            batches=found.num_batches,
            sizes=found.sizes,
            numel=0,
            value=None,
            site=self._notes.site(),
        )

    def _note(self, note: CollectedNote, copy: HostCopy | None = None) -> None:
        """Write `note` once the number in `copy` has arrived. Notes stay in order, since ranks are compared by it."""
        self._arriving.append((copy, note))
        self._write_arrived()

    def _write_arrived(self) -> None:
        while self._arriving and ((copy := self._arriving[0][0]) is None or copy.has_arrived()):
            note = self._arriving.popleft()[1]
            if copy is not None:
                note["value"] = float(copy.numbers)
                copy.release()
            self._notes.write("collected", note)

    def _write_all(self) -> None:
        """At the end, wait briefly for numbers that are in flight."""
        until_s = time.monotonic() + _BUSY_S
        while self._arriving and time.monotonic() < until_s:
            self._write_arrived()
            time.sleep(0.001)
        self._arriving.clear()

    def _averages(self, name: str, reduce_op: str) -> bool:
        """True if, judging by its source, the program takes the unweighted mean of what `name` collects."""
        if name not in _GATHERING and reduce_op != "avg":
            return True
        frame = self._notes.user_frame()
        if frame is None:
            return False
        if name in _GATHERING:
            return is_averaged(frame, name, *_GATHERING[name])
        return not is_scaled_later(frame, name, "tensor")

    def _counts(self, found: Pass) -> bool:
        """True if one more number that is collected after `found` should be noted."""
        seen, count = self._num_collected
        self._num_collected = (found, count + 1 if seen is found else 1)
        return self._num_collected[1] <= _MAX_COLLECTED

    def _note_graph(self, name: str, tensor: torch.Tensor) -> None:
        self._marks_all = True
        call = CollectiveNote(op=name, site=self._notes.site())
        losses = _find_marks(tensor.grad_fn)
        if len(losses) > 1:
            self._num_noted += 1
            note = OnGraphNote(**call, case="sum", losses=len(losses), numel=tensor.numel())
            self._notes.write("on_graph", note)
        elif not losses:
            self._marked.append((ref(tensor), call))

    def _begins(self, tensors: Any, *_: Any, **__: Any) -> None:
        self._backward += 1
        self._write_arrived()
        is_marked = self._marks_all or self._backward <= _NUM_ALL_MARKED or not self._backward % _MARK_EVERY
        if not (is_marked or self._marked):
            return
        given = (tensors,) if isinstance(tensors, torch.Tensor) else [one for _, one in tensors_in(tensors)]
        if self._marked:
            self._find_reduced([one for one in given if one.grad_fn is not None])
        num_marked = 0
        for loss in given:
            if num_marked < 2 and (node := loss.grad_fn) is not None:
                num_marked += 1
                _mark(node, self._backward)

    def _find_reduced(self, losses: list[torch.Tensor]) -> None:
        for reference, call in self._marked:
            tensor = reference()
            if tensor is not None and any(loss is tensor or _reaches(loss.grad_fn, tensor) for loss in losses):
                self._num_noted += 1
                self._notes.write("on_graph", OnGraphNote(**call, case="backward", losses=1, numel=tensor.numel()))
        self._marked.clear()


def _numbers_of(value: Any) -> list[float | None]:
    """The number that `value` is, or the numbers in a dict; [None] if it is or contains anything else."""
    if not isinstance(value, dict):
        return [_number_of(value)]
    numbers = [_number_of(one) for one in value.values()]
    return [None] if None in numbers or not 0 < len(numbers) <= _MAX_NAMED else numbers


def _number_of(value: Any) -> float | None:
    """`value` as a float; None if it is not a single number, or one on a device."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and value.device.type == "cpu" and not value.is_complex() else None
    # NumPy's numbers are Real, too.
    return float(value) if type(value) is not bool and isinstance(value, Real) else None


def _name_of(reduce_op: Any) -> str:
    """Name of the reduce-op; ``sum``, torch's default, for None."""
    text = "sum" if reduce_op is None else str(reduce_op)
    return text.rpartition(".")[2].lower()


def _mark(node: Any, number: int) -> None:
    """Record in the graph which backward it belonged to, also if the loss was divided afterwards."""
    for depth in range(_MAX_DEPTH):
        node.metadata[_MARK] = number
        if depth == _MAX_DEPTH - 1 or _makes_loss(type(node).__name__):
            return  # its inputs are not losses, and each access to the graph costs time in every step
        for before, _ in node.next_functions:
            if before is not None:
                node = before
                break
        else:
            return


@lru_cache(maxsize=512)
def _makes_loss(name: str) -> bool:
    """True if `name` is a graph node of one of torch's loss functions, such as ``NllLossBackward0``."""
    return "Loss" in name or "CrossEntropy" in name


def _find_marks(node: Any) -> set[int]:
    return {found for one in _walk(node) if (found := one.metadata.get(_MARK)) is not None}


def _reaches(node: Any, tensor: torch.Tensor) -> bool:
    target = tensor.grad_fn
    return target is not None and any(one is target for one in _walk(node))


def _walk(node: Any) -> list[Any]:
    """The nearest nodes of the graph behind `node`, including `node`."""
    found: list[Any] = []
    todo = deque([node])
    while todo and len(found) < _MAX_NODES:
        one = todo.popleft()
        if one is None or any(one is other for other in found):
            continue
        found.append(one)
        todo += [before for before, _ in one.next_functions]
    return found
