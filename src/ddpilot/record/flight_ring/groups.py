# SPDX-License-Identifier: Apache-2.0
"""Identify process groups, also those that reuse a destroyed group's name, without keeping groups alive."""

from __future__ import annotations

import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

_tables: weakref.WeakSet[GroupTable] = weakref.WeakSet()
"""The table of the recording in progress, if any."""


class GroupEntry:
    """One process group as this rank has seen it; `number` identifies it on this rank."""

    def __init__(self, number: int, fact: dict[str, Any]) -> None:
        self.number = number
        self.fact = fact
        self.alive: Callable[[], Any] = lambda: None
        parts = [part.rpartition(":") for part in str(fact.get("backend", "")).split(",")]
        self._backends = {device: backend for device, _, backend in parts}

    def may_be_polled(self, device: str) -> bool:
        """True if any thread may poll this group's works on `device` (empty: any device) at any time.

        True for gloo. With NCCL a poll is a CUDA call, which would invalidate a CUDA graph that is being captured.
        """
        return self._backends_for(device) == {"gloo"}

    def reports_failure(self, device: str) -> bool:
        """True if the futures of this group's works on `device` (empty: any device) report whether a collective failed.

        Futures of NCCL and of similar backends are complete as soon as the collective has started.
        """
        return self._backends_for(device) <= {"gloo", "mpi", "ucc"}

    def _backends_for(self, device: str) -> set[str | None]:
        return {self._backends.get(device, self._backends.get(""))} if device else {*self._backends.values()}


class GroupTable:
    """Every process group that this rank has used since recording started.

    `registry` is `torch.distributed.distributed_c10d`, which holds a group until it is destroyed. `next_seqs` holds the
    number of the next collective of each group, by the group's number.
    """

    def __init__(self, registry: Any) -> None:
        self.has_used_any = False
        """True once a group that torch's registry holds has been used."""
        self.next_seqs: defaultdict[int, int] = defaultdict(int)
        self._registry = registry
        self.by_id: dict[int, GroupEntry] = {}
        """Entries by the id of their group, which `alive` of the entry has to return; another group may have the id."""
        self._by_name: dict[str, list[GroupEntry]] = {}
        self._incarnations: Counter[tuple[str, int]] = Counter()
        _tables.add(self)

    def find(self, group: Any) -> GroupEntry:
        """Return the entry of `group`, a `ProcessGroup`, and create it at first use."""
        entry = self.by_id.get(id(group))
        if entry is not None and entry.alive() is group:
            return entry
        return self._find_slowly(group)

    def count(self) -> dict[str, int]:
        """Return the number of collectives begun, without point-to-point operations, of each group in the registry.

        Keys are a group's name and its ranks, such as "0 0-3".
        """
        counts = {}
        for group in list(self._registry._world.pg_map):
            entry = self.by_id.get(id(group))
            if entry is not None and entry.alive() is group:
                counts[f"{entry.fact['name']} {entry.fact['ranks']}"] = self.next_seqs[entry.number]
            else:
                counts[f"{group.group_name} {pack_ranks(self._registry.get_process_group_ranks(group))}"] = 0
        return counts

    def _find_slowly(self, group: Any) -> GroupEntry:
        for key in [key for key, entry in tuple(self.by_id.items()) if not entry.alive()]:
            self.by_id.pop(key, None)
        name = group.group_name
        if group in self._registry._world.pg_map:
            entry = self._make(name, self._describe(group))
            self.has_used_any = True
            # While the registry holds a group, Python sees it as one object.
            entry.alive = weakref.ref(group)
            self.by_id[id(group)] = entry
            return entry
        # Destroyed but still used by a DDP model: Python sees a new object each time.
        destroyed = [entry for entry in self._by_name.get(name, ()) if entry.alive() is None]
        return (
            destroyed[-1] if destroyed else self._make(name, {"name": name, "size": group.size(), "rank": group.rank()})
        )

    def _make(self, name: str, fact: dict[str, Any]) -> GroupEntry:
        text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        attempt = int(text) if text.isdecimal() else 0
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
        except RuntimeError:  # some backends do not count
            seq = None
        fact = {"name": group.group_name, "desc": group.group_desc, "backend": str(backend), "size": group.size()}
        return {**fact, "rank": group.rank(), "ranks": pack_ranks(ranks), "backend_seq": seq}


def count_by_group() -> dict[str, int]:
    """Return `GroupTable.count` of the recording in progress; empty if collectives are not recorded."""
    return next((table.count() for table in tuple(_tables)), {})


def pack_ranks(ranks: Sequence[int]) -> str:
    """Format ranks in their order as runs of consecutive numbers: ``0-3,8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def unpack_ranks(text: str) -> tuple[int, ...]:
    """Parse the text of `pack_ranks` into ranks."""
    ranks: list[int] = []
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return tuple(ranks)
