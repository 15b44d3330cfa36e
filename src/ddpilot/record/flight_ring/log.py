# SPDX-License-Identifier: Apache-2.0
"""Values read from a rank's ring, without a connection to the rank or to torch, and identities of process groups."""

from __future__ import annotations

import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddpilot.user_files import CodeLine

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor passed to a collective."""

    dtype: str
    """For example ``float32``."""
    shape: tuple[int, ...]
    device: str
    """For example ``cuda:0``."""


@dataclass(frozen=True, slots=True)
class CallSite(CodeLine):
    """The user's line that started a collective; a library's line if no line of the user did."""

    file: str = ""
    """Empty if no line is known."""
    line: int = 0
    via: str = ""
    """The library function that the line called, such as ``barrier`` or ``Tensor.backward``."""
    callers: tuple[CodeLine, ...] = ()
    """The user's calls that led to the line, innermost first, at most 5."""

    @property
    def place(self) -> str:
        """File and line, such as ``train.py:88`` or ``Cell In[7]:3``; empty if no line is known."""
        return f"{self.file}:{self.line}" if self.file else ""


GroupKey = tuple[str, int, int, tuple[int, ...]]
"""Name, attempt, incarnation and ranks of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOfRanks:
    """A process group as seen by the rank that recorded it."""

    name: str
    """torch's name for the group, equal on all of its ranks; torch reuses names of destroyed groups."""
    incarnation: int
    """1 for the first group of that name that this rank used in this recording and `attempt`, 2 for the next, and so
    on."""
    attempt: int = 0
    """`TORCHELASTIC_RESTART_COUNT` at that time; a session increments it when it rebuilds its groups."""
    description: str = ""
    backend: str = ""
    """Backends by device type, such as ``cpu:gloo,cuda:nccl``."""
    size: int = 0
    rank: int = -1
    """This rank's number within the group."""
    ranks: tuple[int, ...] = ()
    """Global ranks of the members, in the group's order; empty if torch no longer knew them."""
    backend_seq: int | None = None
    """Sequence number of the backend before the group's first collective in this recording; None if it does not
    count."""

    @property
    def key(self) -> GroupKey:
        """Identity of the group, equal on all of its ranks."""
        return (*self.local_key, self.ranks)

    @property
    def local_key(self) -> tuple[str, int, int]:
        """Identity among the groups of one rank: without `ranks`, which may be thousands to hash."""
        return (self.name, *self.generation)

    @property
    def generation(self) -> tuple[int, int]:
        """Orders successive groups of the same name and ranks; all but the newest have been destroyed."""
        return self.attempt, self.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpPart:
    """The part of DistributedDataParallel's work that a collective does."""

    what: Literal["bucket", "gradients", "unused parameters", "construction", "buffers", "bucket order", "join"]
    """``gradients`` is a bucket that could not be identified; ``bucket order``: ranks agree, once, on rebuilt
    buckets."""
    model: str = ""
    """Class of the wrapped model; empty if not known."""
    index: int | None = None
    """Index of the bucket, from 0 to `num_buckets` - 1."""
    num_buckets: int | None = None
    names: tuple[str, ...] = ()
    """Parameters in the bucket; if there are more than 100, the first 99 and the last."""
    num_parameters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective or point-to-point operation of one rank."""

    index: int
    """Number of the operation on this rank, from 1."""
    op: str
    """PyTorch's public name, such as ``all_reduce``."""
    operator: str
    """torch's operator, such as ``c10d::allreduce_``."""
    group: GroupOfRanks | None
    seq: int | None
    """Number of the collective in its group, from 0, by which ranks are compared; None for point-to-point
    operations."""
    inputs: tuple[Tensor, ...] = ()
    """Tensors that the rank sends, including those changed in place; at most 32."""
    outputs: tuple[Tensor, ...] = ()
    num_inputs: int = 0
    num_outputs: int = 0
    splits: tuple[tuple[int, ...], ...] = ()
    """Output split sizes and input split sizes of an uneven all-to-all."""
    num_bytes: int = 0
    """Size of all inputs; of the outputs if there are no inputs."""
    reduce_op: str | None = None
    """For example ``SUM``; None if the op has none, if the source does not see it, in the first 50 ms, and for most
    collectives of a program that starts more than 5,000 per second."""
    root: int | None = None
    """Rank within the group."""
    peer: int | None = None
    """Rank within the group that is sent to or received from; None for a receive from any rank."""
    tag: int | None = None
    is_async: bool | None = None
    """True if the caller did not ask torch to wait, as in DDP's own collectives. None if torch does not report it."""
    line: CallSite | None = None
    ddp: DdpPart | None = None
    thread: int = 0
    """The operating system's id of the thread that started the operation."""
    start_ns: int = 0
    """Time just before the operation started, on CLOCK_MONOTONIC."""
    state: Literal["begun", "done", "failed", "unknown"] = "begun"
    """``begun``: not seen to finish. ``unknown``: started, but its end cannot be seen (coalesced NCCL calls, a device
    graph, too many pending works). A point-to-point operation that failed after it started is ``done``."""
    is_watched: bool = True
    """True if a thread checks every 50 ms whether the operation has finished. If False (NCCL), a finished operation
    shows only when later ones start."""
    pending_ns: int | None = None
    """Time at which it was last seen pending; if the state is ``unknown``, set only if there were too many pending
    works."""
    end_ns: int | None = None
    """Time at which it was first seen finished, at most 50 ms late. None if it was not seen to finish."""

    @property
    def is_p2p(self) -> bool:
        """True for a point-to-point operation."""
        return self.seq is None

    @property
    def is_passed_over(self) -> bool:
        """True if it was pending when there were too many works to follow. Unlike in a device graph, it has started."""
        return self.state == "unknown" and self.pending_ns is not None


@dataclass(frozen=True, kw_only=True)
class RankLog:
    """Contents of a rank's ring at the time of reading: `rank`, `pid`, collectives and the state of the recording."""

    rank: int
    pid: int
    host: str
    """Name of the machine."""
    torch: str
    """Version of torch."""
    started_ns: int
    """Start of the recording, on CLOCK_MONOTONIC like every other time here."""
    started_unix_ns: int
    """Start of the recording in Unix time, to compare machines."""
    heartbeat_ns: int | None
    """Time at which a Python thread of the rank last ran, updated every 50 ms while the GIL is available."""
    left_ns: int | None = None
    """Time at which the rank was seen to have destroyed its process groups or ended without an error; else None."""
    entering_ns: int | None = None
    """Time since which the main thread has been seen in init_process_group; None if it is not in it."""
    asked_world_size: int = 0
    """World size passed to init_process_group; meaningless if `entering_ns` is None."""
    asked_rank: int = 0
    """Rank passed to init_process_group; meaningless if `entering_ns` is None."""
    is_closed: bool = False
    """True if only ranks of this job can join: this process has no children, and ranks meet in the launcher's store on
    one machine."""
    closed_ns: int | None
    """Time at which the rank stopped recording normally; None while it runs or if it died."""
    num_begun: int
    """Collectives since recording started, including those that the ring no longer holds."""
    num_torn: int
    """Records that were incomplete: being written at the time of reading, or when the rank died."""
    num_faults: int
    """Errors of the recording itself."""
    first_fault: str
    """Message of the first error of the recording; "" if there is none."""
    collectives: tuple[Collective, ...]
    """The newest collectives, oldest first."""


REDUCING = frozenset(
    {
        *("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
        "reduce_scatter_tensor_coalesced",
    }
)
"""Ops whose record contains the reduce-op, which is added some time after the record is written."""
