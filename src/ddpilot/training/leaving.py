# SPDX-License-Identifier: Apache-2.0
"""Notices a rank that left `batches` by itself, before it meets the others in another collective than theirs."""

from __future__ import annotations

import sys
from typing import ClassVar
from weakref import WeakKeyDictionary

from torch.distributed.distributed_c10d import _get_process_group_store

from ddpilot.errors import LoopError
from ddpilot.group.process_group import Group
from ddpilot.group.protocol import GroupLike
from ddpilot.group.waiting import came
from ddpilot.training.grouping import CurrentBatch
from ddpilot.training.notices import Line, say_dropped

_PATIENCE_S = 3.0
"""How long a rank that left waits for the others to leave there too, before it says so."""
_LIMIT_S = 30.0
"""How long before it raises: another rank may write a file first."""


class Leaving:
    """A loop over `batches` that was left by `break`: fine where all ranks do, at the same batch.

    A rank that does alone would go on to a collective of its own while the others wait for its gradients, which ends
    a process without an exception over gloo, and hangs over NCCL. So it asks the store, which the others need not
    look at, whether they left too.
    """

    _num_loops: ClassVar[WeakKeyDictionary[object, int]] = WeakKeyDictionary()

    def __init__(self, group: GroupLike) -> None:
        self._group = group
        self._num_passes = 0
        self._loop = 0
        if isinstance(group, Group):  # every rank makes the same loops, so that they count alike
            self._loop = self._num_loops[group.process_group] = self._num_loops.get(group.process_group, 0) + 1
        self._left: tuple[CurrentBatch, Line] | None = None
        self._dropped_at: Line | None = None

    def begin_pass(self) -> None:
        """Every rank begins a pass: what was left before has names of its own in the store."""
        self._num_passes += 1

    def note(self, batch: CurrentBatch | None, line: Line, *, drops: bool) -> None:
        """This rank left at `batch`, at `line` of the user's program. Not collective.

        `drops`: in the middle of an accumulation group, whose gradients are gone by it.
        """
        if drops:
            self._dropped_at = line
        if batch is not None and isinstance(self._group, Group) and self._group.world_size > 1:
            batch.data = None
            self._left = batch, line

    def meet(self) -> None:
        """Before a collective, on a rank that left: wait for the others to leave too.

        Says on stderr after `_PATIENCE_S` which did not; LoopError after `_LIMIT_S`.
        """
        if self._left is None or not isinstance(self._group, Group):
            return
        (batch, line), self._left = self._left, None
        rank = self._group.rank
        key = f"ddpilot/left/{self._loop}/{self._num_passes}/{batch.epoch}/{batch.index}/"
        others = {one: f"{key}{one}" for one in range(self._group.world_size) if one != rank}
        try:
            store = _get_process_group_store(self._group.process_group)
            store.set(f"{key}{rank}", "")
            if came(store, list(others.values()), _PATIENCE_S):
                return
            error = self._alone(batch, line, [one for one, name in others.items() if not store.check([name])])
            sys.stderr.write(f"ddpilot: waits for {_LIMIT_S - _PATIENCE_S:.0f} s more: {error}\n")
            sys.stderr.flush()
            if came(store, list(others.values()), _LIMIT_S - _PATIENCE_S):
                return
        except RuntimeError:  # the store is gone, with the rank that had it: the next collective says so
            return
        raise error

    def settle(self) -> None:
        """Before training goes on: `meet`, and say on rank 0 which gradients were dropped."""
        self.meet()
        # Not when the loop is left: that looks the same where an error or another rank's end is the reason.
        if self._dropped_at is not None:
            say_dropped(self._dropped_at, self._group)
            self._dropped_at = None

    def _alone(self, batch: CurrentBatch, line: Line, missing: list[int]) -> LoopError:
        return LoopError(
            f"leaving batches() at batch {batch.index} of epoch {batch.epoch} ({line[0]}:{line[1]})",
            found=f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} did not leave there, and what comes "
            "next here would meet other collectives of theirs",
            fix="Where one rank decides, call loop.stop(): it ends the loop of all of them after the same update. A "
            "`break` has to be every rank's, at one batch.",
            rank=self._group.rank,
        )
