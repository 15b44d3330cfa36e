# SPDX-License-Identifier: Apache-2.0
"""Values read from a rank's ring, without a connection to the rank or to torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddpilot.user_files import CodeLine


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
