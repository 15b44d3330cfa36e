# SPDX-License-Identifier: Apache-2.0
"""Note in which order a program all-reduces gradients itself, at the first steps after an all_reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ddpilot.guard.notes import ReductionOrderNote, Site
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.parameters.fingerprint import Fingerprinter, PendingFingerprint, is_plain
from ddpilot.guard.probes.parameters.parameter_names import find_parameter_names
from ddpilot.guard.probes.process_groups import GroupGenerations, find_world
from ddpilot.record.accelerator import HostCopies, is_capturing

_WeakRef: Any = StorageWeakRef
_MAX_CALLS = 2000
_MAX_STEPS = 8
"""Number of steps after an all_reduce that are observed; then all hooks are removed."""


class _Call(NamedTuple):
    """One all_reduce. While the weak reference to the storage lives, no other storage has its address."""

    group: str
    storage: Any
    at: int
    size: int


class ReducedOrderProbe:
    """Observes all_reduce until a few steps have followed one."""

    name = "the order of all_reduce"

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._line: Site = {}
        self._num_steps = 0
        self._num_noted: dict[str, int] = {}
        self._generations = GroupGenerations()
        self._world: Any = None
        self._copies = HostCopies()
        self._pending: list[tuple[ReductionOrderNote, PendingFingerprint]] = []
        self._looking: list[Callable[[], None]] = []

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        self._notes = notes
        self._looking = [notes.around(dist, "all_reduce", before=self._begins, aliases=(distributed_c10d,))]
        return [self._take_out]

    def _take_out(self) -> None:
        # Not called in an optimizer hook, while torch iterates over the hooks.
        while self._looking:
            self._looking.pop()()

    def _begins(self, tensor: Any, op: Any = None, group: Any = None, *_: Any, **__: Any) -> None:  # noqa: ARG002
        if self._num_steps >= _MAX_STEPS or len(self._calls) >= _MAX_CALLS:
            self._num_steps, self._calls = _MAX_STEPS, []
            self._write_arrived()
            if not self._pending:
                self._take_out()
            return
        if group is dist.GroupMember.NON_GROUP_MEMBER or not (is_plain(tensor) and tensor.is_contiguous()):
            return
        if len(self._looking) == 1:
            before_step = self._notes.safely(self._before_step)
            self._looking.append(register_optimizer_step_pre_hook(before_step).remove)
        storage = _WeakRef(tensor.untyped_storage())
        self._forget_earlier_generation()
        # Not its ranks: several groups may have the same, and each has its own order.
        named = "world" if group is None or group is find_world() else str(group.group_name)
        if not self._line:
            self._line = self._notes.site()
        self._calls.append(_Call(named, storage, int(tensor.storage_offset()), tensor.numel()))

    def _forget_earlier_generation(self) -> None:
        """Start from zero with a new default group: the ranks may have left the one before at different calls."""
        world = find_world()  # None before a first collective that enters the group, as in a session
        if self._world is not None and world is not self._world:
            self._calls, self._line, self._num_noted = [], {}, {}
        self._world = world
        if world is not None:
            self._generations.has_changed()

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._write_arrived()
        if not self._calls or is_capturing():
            return
        self._forget_earlier_generation()
        calls, self._calls = self._calls, []
        self._line, line = {}, self._line
        self._num_steps += 1
        places = {
            (
                parameter.grad.untyped_storage()._cdata,
                parameter.grad.storage_offset(),
                parameter.grad.numel(),
            ): parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and is_plain(parameter) and is_plain(parameter.grad)
        }
        reduced: dict[str, list[Tensor | None]] = {}
        for call in calls:
            key = call.storage.cdata, call.at, call.size
            reduced.setdefault(call.group, []).append(None if call.storage.expired() else places.get(key))
        for group, parameters in reduced.items():
            if any(parameter is not None for parameter in parameters):
                self._note(optimizer, group, parameters, line)

    def _note(self, optimizer: Optimizer, group: str, reduced: list[Tensor | None], line: Site) -> None:
        parameters = list({id(one): one for one in reduced if one is not None}.values())
        found = find_parameter_names(optimizer, self._notes.user_frame())
        all_places = [id(one) for each in optimizer.param_groups for one in each["params"]]
        names = {
            id(one): found.get(id(one), f"parameter {all_places.index(id(one)) + 1} {list(one.shape)}")
            for one in parameters
        }
        number = self._num_noted[group] = self._num_noted.get(group, 0) + 1
        note = ReductionOrderNote(
            key=[self._generations.name, group, number],
            names=list(names.values()),
            order=["" if one is None else names[id(one)] for one in reduced],
            sums="",
            line=line,
            site=self._notes.site(),
        )
        self._pending.append((note, Fingerprinter(parameters).begin(self._copies)))
        self._write_arrived()

    def _write_arrived(self) -> None:
        """Write the notes whose fingerprints have arrived."""
        while self._pending and self._pending[0][1].has_arrived():
            note, pending = self._pending.pop(0)
            note["sums"] = pending.fingerprint()["w"]
            self._notes.write("reduction_order", note)
