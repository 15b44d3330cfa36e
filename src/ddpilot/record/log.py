# SPDX-License-Identifier: Apache-2.0
"""What is read from a rank's ring: values, without any connection to the rank or to torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor as it was given to a collective."""

    dtype: str
    """Such as ``float32``."""
    shape: tuple[int, ...]
    device: str
    """Such as ``cuda:0``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The user's line that asked for a collective; of a library where there is none of the user's."""

    file: str = ""
    """As Python has it, of a cell ``Cell In[7]``; empty where no line is known."""
    line: int = 0
    function: str = ""
    text: str = ""
    """The source line, without indentation."""
    via: str = ""
    """The library function that it called, such as ``barrier`` or ``Tensor.backward``."""
    callers: tuple[tuple[str, int, str, str], ...] = ()
    """The user's calls that led there, innermost first, at most 5: file, line, function and text of each."""

    @property
    def place(self) -> str:
        """File and line, such as ``train.py:88`` or ``Cell In[7]:3``; empty where no line is known."""
        return f"{self.file}:{self.line}" if self.file else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOfRanks:
    """A process group, as the rank that wrote it saw it."""

    name: str
    """torch's name for it, the same on all of its ranks; torch reuses names after destroying a group."""
    incarnation: int
    """1 for the first group of that name that this rank used in this recording in this `attempt`."""
    attempt: int = 0
    """torch's count of restarts (`TORCHELASTIC_RESTART_COUNT`) then; a session counts up where it makes groups anew."""
    description: str = ""
    backend: str = ""
    """By device type, such as ``cpu:gloo,cuda:nccl``."""
    size: int = 0
    rank: int = -1
    """This rank's number within the group."""
    ranks: tuple[int, ...] = ()
    """Its members' ranks in the job, in the group's order; empty where torch no longer knew."""
    backend_seq: int | None = None
    """How many collectives the backend had counted before the first one in this recording; None if it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpPart:
    """What of DistributedDataParallel's work a collective is."""

    what: Literal["bucket", "gradients", "unused parameters", "construction", "buffers", "bucket order", "join"]
    """``gradients``: a bucket, but which one is not known; ``bucket order``: ranks agree on their buckets, once."""
    model: str = ""
    """Class of the wrapped model, empty where not known."""
    index: int | None = None
    """Of the bucket, among `num_buckets`."""
    num_buckets: int | None = None
    names: tuple[str, ...] = ()
    """The bucket's parameters; of more than 100 the first 99 and the last."""
    num_parameters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective, or point-to-point operation, of one rank."""

    index: int
    """Counts this rank's from 1."""
    op: str
    """In PyTorch's public spelling, such as ``all_reduce``."""
    operator: str
    """torch's own name for it, such as ``c10d::allreduce_``."""
    group: GroupOfRanks | None
    seq: int | None
    """Counts the group's collectives from 0, by which ranks are compared; None for point-to-point."""
    inputs: tuple[Tensor, ...] = ()
    """What the rank gives, also what is changed in place; at most 32."""
    outputs: tuple[Tensor, ...] = ()
    num_inputs: int = 0
    num_outputs: int = 0
    splits: tuple[tuple[int, ...], ...] = ()
    """Of an uneven all-to-all: output split sizes, input split sizes."""
    num_bytes: int = 0
    """Of all inputs; of the outputs where there is no input."""
    reduce_op: str | None = None
    """Such as ``SUM``; None where there is none, where the source does not see it, in the first 50 ms, and for most
    collectives of a program that starts more than 5,000 in a second."""
    root: int | None = None
    """Number within the group."""
    peer: int | None = None
    """Number within the group of the rank it sends to or receives from; None for a receive from any."""
    tag: int | None = None
    is_async: bool | None = None
    """Whether the caller did not ask torch to wait; DDP's own collectives are. None where torch does not say."""
    line: Line | None = None
    ddp: DdpPart | None = None
    thread: int = 0
    """The operating system's id of the thread that started it."""
    start_ns: int = 0
    """Just before it started, on the machine's CLOCK_MONOTONIC."""
    state: Literal["begun", "done", "failed", "unknown"] = "begun"
    """``begun``: not seen to be over. ``unknown``: it has started, but its end cannot be seen (several that NCCL runs
    as one, a device graph, too many at once). A point-to-point operation that failed once started is ``done``."""
    is_watched: bool = True
    """A thread looks every 50 ms whether it is over. If not (NCCL), one that is over shows when the next ones start."""
    pending_ns: int | None = None
    """When it was last seen not to be over; of one whose state is ``unknown`` only where there were too many."""
    end_ns: int | None = None
    """When it was first seen to be over, up to 50 ms after it was. None if it was not seen to be."""

    @property
    def is_p2p(self) -> bool:
        """Whether it is a point-to-point operation."""
        return self.seq is None

    @property
    def is_passed_over(self) -> bool:
        """True if it was pending when there were too many to follow: unlike one of a graph, it has begun to run."""
        return self.state == "unknown" and self.pending_ns is not None


@dataclass(frozen=True, kw_only=True)
class RankLog:
    """What a rank's ring held when it was read."""

    rank: int
    pid: int
    host: str
    torch: str
    source: str
    """``kernels`` or ``hooks``."""
    started_ns: int
    """On the machine's CLOCK_MONOTONIC, as every time here."""
    started_unix_ns: int
    """The same moment by the machine's calendar clock, to compare machines."""
    heartbeat_ns: int | None
    """When a Python thread of the rank last ran; every 50 ms while Python's lock is to be had."""
    left_ns: int | None = None
    """When it was seen to have destroyed its process groups, or came to its end without an error; else None."""
    entering_ns: int | None = None
    """Since when its main thread has been seen in init_process_group; None where it is not in it."""
    asked_world_size: int = 0
    """What it has asked for there, as the next one; without meaning where `entering_ns` is None."""
    asked_rank: int = 0
    is_closed: bool = False
    """Only ranks of this job can come there: this one has been seen to have no children, and to meet in its launcher's
    store on one machine."""
    closed_ns: int | None
    """When the rank stopped recording in an orderly way; None while it runs, and where it died."""
    num_begun: int
    """Collectives since the recording began, those included that the ring no longer holds."""
    num_torn: int
    """Records that were being written: at the moment of reading, or when the rank died."""
    num_faults: int
    """Errors of the recording itself."""
    first_fault: str
    collectives: tuple[Collective, ...]
    """The newest ones, oldest first."""
