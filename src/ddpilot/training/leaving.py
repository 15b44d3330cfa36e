# SPDX-License-Identifier: Apache-2.0
"""Notices a rank that left `batches` by itself, before it meets the others in another collective than theirs."""

from __future__ import annotations

import sys

from torch.distributed.distributed_c10d import _get_process_group_store

from ddpilot.group.process_group import Group
from ddpilot.group.protocol import GroupLike
from ddpilot.group.waiting import came
from ddpilot.training.grouping import CurrentBatch
from ddpilot.training.notices import Line

_PATIENCE_S = 3.0
"""How long a rank that left waits for the others to leave there too, before it says so and goes on."""


class Leaving:
    """A loop over `batches` that was left by `break`: fine where all ranks do, at the same batch.

    A rank that does alone would go on to a collective of its own while the others wait for its gradients, which ends
    the process without an exception over gloo, and hangs over NCCL. So it asks the store, which the others need not
    look at, whether they left too.
    """

    def __init__(self, group: GroupLike) -> None:
        self._group = group
        self._left: tuple[CurrentBatch, Line] | None = None

    def note(self, batch: CurrentBatch | None, line: Line) -> None:
        """This rank left at `batch`, at `line` of the user's program. Not collective."""
        if batch is not None and isinstance(self._group, Group) and self._group.world_size > 1:
            batch.data = None
            self._left = batch, line

    def meet(self) -> None:
        """Before a collective: say on stderr, as a rank that left, which ranks did not within `_PATIENCE_S`."""
        if self._left is None or not isinstance(self._group, Group):
            return
        (batch, line), self._left = self._left, None
        rank, others = self._group.rank, [one for one in range(self._group.world_size) if one != self._group.rank]
        key = f"ddpilot/left/{batch.epoch}/{batch.index}/"
        try:
            store = _get_process_group_store(self._group.process_group)
            store.set(f"{key}{rank}", "")
            if came(store, [f"{key}{one}" for one in others], _PATIENCE_S):
                return
            missing = [one for one in others if not store.check([f"{key}{one}"])]
        except RuntimeError:  # the store is gone, with the rank that had it: the next collective says so
            return
        sys.stderr.write(
            f"ddpilot: rank {rank} left batches() at batch {batch.index} of epoch {batch.epoch} ({line[0]}:{line[1]}), "
            f"and rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} did not: what comes next here meets "
            "other collectives of theirs, which ends or hangs all ranks. Where one rank decides, call loop.stop(): it "
            "ends the loop of all of them after the same update. A `break` has to be every rank's, at one batch.\n"
        )
        sys.stderr.flush()
