# SPDX-License-Identifier: Apache-2.0
"""Detects a rank that left `Loop.batches` alone, before its next collective is paired with a different one."""

from __future__ import annotations

import sys
from typing import ClassVar
from weakref import WeakKeyDictionary

from torch.distributed.distributed_c10d import _get_process_group_store

from ddpilot.errors import LoopError
from ddpilot.group.process_group import Group
from ddpilot.group.protocol import GroupLike
from ddpilot.group.waiting import came
from ddpilot.training.batches import CurrentBatch
from ddpilot.training.notices import Line, say_dropped

_PATIENCE_S = 3.0
"""Seconds that a rank waits for the other ranks to leave too, before it prints a warning."""
_LIMIT_S = 30.0
"""Seconds before it raises: a different rank may be writing a file."""


class Leaving:
    """Tracks loops over `batches` that were left by `break`, which every rank must do at the same batch.

    A rank that leaves alone would run its next collective while the other ranks wait for its gradients. Over gloo that
    ends a process without an exception; over NCCL it hangs. This rank therefore checks the store, which needs no
    cooperation of the other ranks, whether they left too.
    """

    _num_loops: ClassVar[WeakKeyDictionary[object, int]] = WeakKeyDictionary()

    def __init__(self, group: GroupLike) -> None:
        self._group = group
        self._num_passes = 0
        self._loop = 0
        if isinstance(group, Group):  # every rank makes the same loops, so their numbers agree
            self._loop = self._num_loops[group.process_group] = self._num_loops.get(group.process_group, 0) + 1
        self._left: tuple[CurrentBatch, Line] | None = None
        self._dropped_at: Line | None = None

    def begin_pass(self) -> None:
        """Begin a new pass, whose keys in the store differ from those of earlier passes. Every rank calls it."""
        self._num_passes += 1

    def note(self, batch: CurrentBatch | None, line: Line, *, drops: bool) -> None:
        """Record that this rank left at `batch`, at `line` of the user's program. Not collective.

        `drops`: True if it left within an accumulation group, whose gradients are lost.
        """
        if drops:
            self._dropped_at = line
        if batch is not None and isinstance(self._group, Group) and self._group.world_size > 1:
            batch.data = None
            self._left = batch, line

    def meet(self) -> None:
        """Wait for the other ranks to leave too. Called before a collective; does nothing on a rank that did not leave.

        After `_PATIENCE_S` it prints to stderr which ranks did not leave; after `_LIMIT_S` it raises LoopError.
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
        except RuntimeError:  # the rank that hosts the store has exited: the next collective raises for it
            return
        raise error

    def settle(self) -> None:
        """Call `meet` before training continues, and report dropped gradients on rank 0."""
        self.meet()
        # Not reported when the loop is left: an error or the exit of a different rank would look the same.
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
