# SPDX-License-Identifier: Apache-2.0
"""Tell process groups apart, also those that have a predecessor's name, without keeping any of them alive."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MAX_GROUPS = 1 << 20
"""Of one process, in all its life; only those that it has take memory."""


class GroupEntry:
    """One process group as this rank has seen it; `number` is its own."""

    def __init__(self, number: int, fact: dict[str, Any]) -> None:
        self.number = number
        self.fact = fact
        self.alive: Callable[[], Any] = lambda: None
        self._backends = dict(_parse_backends(str(fact.get("backend", ""))))

    def may_be_asked(self, device: str) -> bool:
        """Whether any thread may ask the works of this group on `device` (empty: any) at any time if they are over.

        So it is with gloo; with NCCL that is a CUDA call, which would spoil a CUDA graph that is being captured.
        """
        return self._backends_for(device) == {"gloo"}

    def tells_failure(self, device: str) -> bool:
        """Whether the futures of this group's works on `device` (empty: any) say in the end if a collective failed.

        Those of NCCL, and of what is made like it, are complete as soon as the collective was started.
        """
        return self._backends_for(device) <= {"gloo", "mpi", "ucc"}

    def _backends_for(self, device: str) -> set[str | None]:
        return {self._backends.get(device, self._backends.get(""))} if device else {*self._backends.values()}


class GroupBook:
    """Every process group that this rank has used since the recording began.

    `registry` is `torch.distributed.distributed_c10d`, which knows a group until it is destroyed. `next_seqs`: of each
    group, by its number, the number of its next collective.
    """

    def __init__(self, registry: Any) -> None:
        self.has_used_any = False
        """Whether a group that torch knew then has been used."""
        self.next_seqs = memoryview(mmap.mmap(-1, 8 * MAX_GROUPS)).cast("q")
        self._registry = registry
        self._by_id: dict[int, GroupEntry] = {}
        self._by_name: dict[str, list[GroupEntry]] = {}
        self._incarnations: Counter[tuple[str, int]] = Counter()

    def find(self, group: Any) -> GroupEntry:
        """The entry of `group`, a `ProcessGroup`; the first time, one is made."""
        entry = self._by_id.get(id(group))
        if entry is not None and entry.alive() is group:
            return entry
        return self._find_slowly(group)

    def _find_slowly(self, group: Any) -> GroupEntry:
        self._by_id = {key: entry for key, entry in self._by_id.items() if entry.alive()}
        name = group.group_name
        if group in self._registry._world.pg_map:
            entry = self._make(name, self._describe(group))
            self.has_used_any = True
            # While torch's registry holds a group, Python sees it as one object; this is what tells it from others.
            entry.alive = weakref.ref(group)
            self._by_id[id(group)] = entry
            return entry
        # Destroyed, but a DDP model still uses it: Python then sees a new object each time.
        gone = [entry for entry in self._by_name.get(name, ()) if entry.alive() is None]
        return gone[-1] if gone else self._make(name, {"name": name, "size": group.size(), "rank": group.rank()})

    def _make(self, name: str, fact: dict[str, Any]) -> GroupEntry:
        attempt = _read_attempt()
        self._incarnations[name, attempt] += 1
        number = sum(self._incarnations.values())
        counts = {"attempt": attempt, "incarnation": self._incarnations[name, attempt]}
        entry = GroupEntry(number, {**fact, **counts})
        self._by_name[name] = [*self._by_name.get(name, ())[-3:], entry]
        return entry

    def _describe(self, group: Any) -> dict[str, Any]:
        backend = self._registry._world.pg_backend_config[group]  # such as cpu:gloo,cuda:nccl
        ranks = self._registry.get_process_group_ranks(group)
        try:
            seq = group._get_sequence_number_for_group()
        except RuntimeError:  # not every backend counts
            seq = None
        fact = {"name": group.group_name, "desc": group.group_desc, "backend": str(backend), "size": group.size()}
        return {**fact, "rank": group.rank(), "ranks": pack_ranks(ranks), "backend_seq": seq}


def _read_attempt() -> int:
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def _parse_backends(text: str) -> Iterator[tuple[str, str]]:
    for part in text.split(","):
        device, _, backend = part.rpartition(":")
        yield device, backend


def pack_ranks(ranks: Sequence[int]) -> str:
    """Rank numbers in their order, runs of neighbours shortened: ``0-3,8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def unpack_ranks(text: str) -> tuple[int, ...]:
    """The rank numbers that `pack_ranks` made `text` of."""
    ranks: list[int] = []
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return tuple(ranks)
