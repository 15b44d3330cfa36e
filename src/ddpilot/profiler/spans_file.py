# SPDX-License-Identifier: Apache-2.0
"""Files in which a rank records its time: spans of phases, and updates. Does not import torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy

from ddpilot.errors import LaunchError
from ddpilot.user_files import CodeLine

PROFILE_VARIABLE = "DDPILOT_PROFILE"
"""Environment variable with the folder into which ranks record their time."""
TRACE_VARIABLE = "DDPILOT_PROFILE_TRACE"
"""Environment variable with the folder for traces of torch.profiler; without it there are none."""
OPTIONS_VARIABLE = "DDPILOT_PROFILE_OPTIONS"
"""Environment variable with `RankOptions` as JSON; without it they are the defaults."""
PHASES = (
    "data",
    "copy",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "checkpoint",
    "evaluation",
    "sync",
    "shadow",
)
"""Phases by number; "other" is what remains of an update, and the span of a closure has the next number."""
HOST_CLOCK = "host"
"""Name of the clock of spans that were recorded on the host, whatever a device does meanwhile."""
SPAN = numpy.dtype([("begin_ns", "<i8"), ("end_ns", "<i8"), ("phase", "<i4"), ("site", "<i4")])
"""A span of the main thread in one phase, on CLOCK_MONOTONIC. Spans nest: the inner one counts for its phase alone."""
UPDATE = numpy.dtype([("end_ns", "<i8"), ("num_samples", "<i8")])
"""The end of the last step of an optimizer before the next backward pass, and the samples of the update; -1 for an
update that is left out, since torch.profiler recorded it."""
MEMORY = numpy.dtype([("time_ns", "<i8"), ("host_bytes", "<i8"), ("device_bytes", "<i8")])
"""Resident memory of the process at a time, and what torch has allocated on its device; -1 without one."""
COUNTS = numpy.dtype(
    [("num_elements", "<i8"), ("num_reductions", "<i8"), ("core_wait_ns", "<i8"), ("search_ns", "<i8")]
)
"""Of an update: elements of its batches; how often a model's gradients were exchanged; how long the main thread was
ready to run and had no core; how long DDP looked for unused parameters."""
BUCKET = numpy.dtype([("begin_ns", "<i8"), ("end_ns", "<i8"), ("num_bytes", "<i8")])
"""A collective of DDP's reducer, on CLOCK_MONOTONIC: from its start on this rank to its end."""
MARK = numpy.dtype([("host_ns", "<i8"), ("device_ns", "<i8"), ("is_beside", "?")])
"""A point of the program: when the host was there, on CLOCK_MONOTONIC, and when the device was, on a clock of its own;
`is_beside` on a stream besides the one that computes."""
DEVICE_CLOCK_FACT = "device_clock"
"""Fact about a rank that has recorded marks: type of the device, and points in time on both clocks."""
SYNC_BATCH_NORM = CodeLine("", 0, "SyncBatchNorm", "")
"""Stands for the line of collectives that torch's SyncBatchNorm calls."""
_SPANS, _UPDATES, _FACTS = "spans.bin", "updates.bin", "facts.jsonl"
_MEMORY, _COUNTS, _BUCKETS, _MARKS = "memory.bin", "counts.bin", "buckets.bin", "marks.bin"


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Options for recording besides phases. Raises LaunchError for a window that records nothing."""

    wait: int = 3
    """Updates that are left out before torch.profiler records, in each cycle."""
    warm_up: int = 1
    """Updates that it records and drops."""
    active: int = 5
    """Updates that it keeps."""
    repeat: int = 1
    """Cycles; each writes a trace."""
    memory: bool = False
    """Record allocations as well."""
    nvtx: bool = False
    """Mark phases as NVTX ranges, which Nsight shows."""
    measures_group: bool = False
    """Measure all_reduces in the group of each DDP model when it is made."""

    def __post_init__(self) -> None:
        if min(self.wait, self.warm_up) < 0 or min(self.active, self.repeat) < 1:
            raise LaunchError(
                "reading --trace-window",
                found=f"{self.wait},{self.warm_up},{self.active},{self.repeat}",
                fix="Give updates to leave out, to warm up and to keep, and how often, such as 3,1,5,1",
            )

    def to_json(self) -> str:
        """Return the value of `OPTIONS_VARIABLE`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> RankOptions:
        """Return the options that a launcher has set."""
        return cls(**json.loads(environ.get(OPTIONS_VARIABLE, "{}")))


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What one rank has recorded."""

    rank: int
    spans: numpy.ndarray[Any, Any]
    """Of type `SPAN`, in the order in which they ended."""
    updates: numpy.ndarray[Any, Any]
    """Of type `UPDATE`, in order."""
    sites: Mapping[int, CodeLine]
    """The user's line of spans, by number."""
    facts: Mapping[str, Any]
    """About the program: threads, cores, workers, options of DDP and others, by name."""
    memory: numpy.ndarray[Any, Any] = field(default_factory=lambda: numpy.zeros(0, MEMORY))
    """Of type `MEMORY`, in order."""
    counts: numpy.ndarray[Any, Any] = field(default_factory=lambda: numpy.zeros(0, COUNTS))
    """Of type `COUNTS`, one for each update, or empty."""
    buckets: numpy.ndarray[Any, Any] = field(default_factory=lambda: numpy.zeros(0, BUCKET))
    """Of type `BUCKET`, those of some updates."""
    marks: numpy.ndarray[Any, Any] = field(default_factory=lambda: numpy.zeros(0, MARK))
    """Of type `MARK`; empty on the CPU."""
    clock: str = HOST_CLOCK
    """Whose times those of spans, updates and buckets are: `HOST_CLOCK`, or the type of a device."""

    @property
    def is_complete(self) -> bool:
        """True if the rank has written everything, as it does when it exits; False if it was killed before."""
        return "num_devices" in self.facts


class TimesWriter:
    """Appends to the files of one rank. Nothing is kept open, so that a forked process writes nothing twice."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._prefix = folder / f"rank{rank}"

    def write_spans(self, spans: Sequence[tuple[int, int, int, int]]) -> None:
        """Append spans: begin, end, phase and site."""
        self._append(_SPANS, numpy.array(list(spans), dtype=SPAN).tobytes())

    def write_updates(self, updates: Sequence[tuple[int, int]]) -> None:
        """Append updates: end, and number of samples."""
        self._append(_UPDATES, numpy.array(list(updates), dtype=UPDATE).tobytes())

    def write_memory(self, samples: Sequence[tuple[int, int, int]]) -> None:
        """Append samples of memory: time, bytes of the host, bytes of the device."""
        self._append(_MEMORY, numpy.array(list(samples), dtype=MEMORY).tobytes())

    def write_counts(self, counts: Sequence[tuple[int, int, int, int]]) -> None:
        """Append counts of updates, as `COUNTS` has them."""
        self._append(_COUNTS, numpy.array(list(counts), dtype=COUNTS).tobytes())

    def write_buckets(self, buckets: Sequence[tuple[int, int, int]]) -> None:
        """Append collectives of DDP's reducer: begin, end and bytes."""
        self._append(_BUCKETS, numpy.array(list(buckets), dtype=BUCKET).tobytes())

    def write_marks(self, marks: Sequence[tuple[int, int, bool]]) -> None:
        """Append points of the program, as `MARK` has them."""
        self._append(_MARKS, numpy.array(list(marks), dtype=MARK).tobytes())

    def write_fact(self, name: str, value: Any) -> None:
        """Append a fact, which replaces an earlier one with this name."""
        self._append(_FACTS, (json.dumps([name, value]) + "\n").encode())

    def _append(self, ending: str, data: bytes) -> None:
        with open(f"{self._prefix}.{ending}", "ab") as file:
            file.write(data)


def take_files(folder: str, rank: int) -> dict[str, bytes]:
    """Return the files of `rank` in `folder` by name, and remove them, and the folder with its last file."""
    found = {}
    for path in Path(folder).glob(f"rank{rank}.*"):
        found[path.name] = path.read_bytes()
        path.unlink()
    with suppress(OSError):  # other ranks of this node have files there, or have removed it
        os.rmdir(folder)
    return found


def find_ranks(folder: Path) -> list[int]:
    """Return the ranks that have recorded into `folder`."""
    numbers = (path.name.removeprefix("rank").partition(".")[0] for path in folder.glob(f"rank*.{_UPDATES}"))
    return sorted({int(number) for number in numbers if number.isdecimal()})


def read_times(folder: Path, rank: int) -> RankTimes:
    """Return what `rank` has recorded into `folder`; a part that was being written is left out."""
    prefix = folder / f"rank{rank}"
    facts: dict[str, Any] = {}
    sites: dict[int, CodeLine] = {}
    for line in _read(f"{prefix}.{_FACTS}").decode().splitlines():
        name, value = json.loads(line)
        if name == "site":
            sites[value[0]] = CodeLine(*value[1:])
        else:
            facts[name] = value
    return RankTimes(
        rank=rank,
        spans=_whole(_read(f"{prefix}.{_SPANS}"), SPAN),
        updates=_whole(_read(f"{prefix}.{_UPDATES}"), UPDATE),
        sites=sites,
        facts=facts,
        memory=_whole(_read(f"{prefix}.{_MEMORY}"), MEMORY),
        counts=_whole(_read(f"{prefix}.{_COUNTS}"), COUNTS),
        buckets=_whole(_read(f"{prefix}.{_BUCKETS}"), BUCKET),
        marks=_whole(_read(f"{prefix}.{_MARKS}"), MARK),
    )


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return b""


def _whole(data: bytes, dtype: numpy.dtype[Any]) -> numpy.ndarray[Any, Any]:
    return numpy.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype=dtype)
