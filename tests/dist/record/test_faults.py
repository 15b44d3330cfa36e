# SPDX-License-Identifier: Apache-2.0
"""An error in the recording is reported once, and training continues."""

from __future__ import annotations

import itertools
import os
import resource
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpilot.errors import RecordError
from ddpilot.record.call_sites import SiteFinder
from ddpilot.record.collectives.recorder import RecordBuilder
from ddpilot.record.collectives.start_stop import start_recording
from ddpilot.record.collectives.unfinished_works import UnfinishedWorks
from ddpilot.record.flight_ring.log import GroupTable
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.flight_ring.writer import RingWriter
from tests.dist.record.ranks import my_rank, read_all, recorded, ring_of, run

BROKEN: list[tuple[type, str]] = [
    (GroupTable, "find"),
    (SiteFinder, "walk"),
    (RingWriter, "begin"),
    (RingWriter, "finish"),
    (RingWriter, "write_fact"),
    (UnfinishedWorks, "add"),
    (UnfinishedWorks, "catch_up"),
]


def reduce_with_a_broken_part(folder: Path, owner: type, name: str) -> tuple[float, list[str]]:
    """A part of the recording raises from the start on; the sum of five all_reduces, and what was said."""
    said: list[str] = []

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("on purpose")

    setattr(owner, name, broken)  # in this rank only, which ends with the test
    with recorded(folder, report=said.append):
        total = torch.zeros(1)
        for _ in range(5):
            value = torch.ones(1)
            dist.all_reduce(value)
            total += value
    return total.item(), said


def reduce_with_one_fault(folder: Path) -> list[int | None]:
    """Describing the second of four all_reduces raises; the numbers in the ring."""
    calls, walk = itertools.count(), SiteFinder.walk

    def broken(self: SiteFinder, *args: Any) -> Any:
        if next(calls) == 1:
            raise ZeroDivisionError("on purpose")
        return walk(self, *args)

    SiteFinder.walk = broken  # type: ignore[method-assign,assignment]  # in this rank only, which ends with the test
    with recorded(folder, report=lambda _: None):
        for number in range(4):
            dist.all_reduce(torch.ones(number + 1))  # each of another size: none is like one before
        return [entry.seq for entry in read_ring(ring_of(folder, my_rank())).collectives]


def test_a_collective_that_cannot_be_recorded_counts(tmp_path: Path) -> None:
    """The numbers after it stay those of the other ranks."""
    assert run(1, reduce_with_one_fault, tmp_path)[0] == [0, 2, 3]


@pytest.mark.parametrize(("owner", "name"), BROKEN)
def test_training_goes_on_when_a_part_of_the_recording_raises(tmp_path: Path, owner: type, name: str) -> None:
    """The collectives give what they should, the error is said once, and the ring counts it."""
    total, said = run(1, reduce_with_a_broken_part, tmp_path, owner, name)[0]
    assert total == 5
    assert len(said) == 1
    assert "ZeroDivisionError: on purpose" in said[0]
    assert "training continues" in said[0]
    log = read_ring(ring_of(tmp_path, 0))
    assert log.num_faults >= 1
    assert log.first_fault == ("" if name == "write_fact" else "ZeroDivisionError: on purpose")


def interrupt_the_recording(folder: Path, owner: type, name: str) -> float:
    """Ctrl-C hits the third collective when a part of the recording has just done its work; a sum of all five."""
    original, num_calls = getattr(owner, name), itertools.count(1)

    def interrupted(part: Callable[..., Any]) -> Callable[..., Any]:
        def run_and_interrupt(*args: Any) -> Any:
            result = part(*args)
            if next(num_calls) == 3:
                raise KeyboardInterrupt
            return result

        return run_and_interrupt

    def interrupted_of(self: Any, operation: Any) -> Callable[..., Any]:
        return interrupted(original(self, operation))

    total = torch.zeros(1)
    # In this rank only, which ends with the test.
    setattr(owner, name, interrupted_of if name.endswith("_of") else interrupted(original))
    with recorded(folder):
        for number in range(5):
            value = torch.ones(1)
            with pytest.raises(KeyboardInterrupt) if number == 2 else nullcontext():
                dist.all_reduce(value)
            total += value
    return total.item()


@pytest.mark.parametrize(
    ("owner", "name", "numbers"),
    [
        (SiteFinder, "walk", [0, 1, 2, 3]),
        (RingWriter, "begin", [0, 1, 2, 2, 3]),
        (RecordBuilder, "begin_of", [0, 1, 2, 3, 4]),
        (UnfinishedWorks, "add", [0, 1, 2, 3, 4]),
    ],
)
def test_interrupt_within_the_recording_leaves_no_record_open(
    tmp_path: Path, owner: type, name: str, numbers: list[int]
) -> None:
    """It reaches the program; the collective's end is unknown if it has a record, and those after it are as ever."""
    assert run(1, interrupt_the_recording, tmp_path, owner, name)[0] == 5
    log = read_ring(ring_of(tmp_path, 0))
    states = [entry.state for entry in log.collectives]
    assert [entry.seq for entry in log.collectives] == numbers
    # What was started before Ctrl-C is followed all the same.
    hit = {"walk": [], "add": ["done"]}.get(name, ["unknown"])
    assert states == ["done", "done", *hit, "done", "done"]
    assert log.num_faults == 0


def record_without_room(folder: Path) -> tuple[list[str], float]:
    """No file may grow beyond 100 kB; what was said, and a sum."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    said: list[str] = []
    dist.init_process_group("gloo")
    with start_recording(ring_of(folder, my_rank()), rank=my_rank(), report=said.append):
        value = torch.ones(1)
        dist.all_reduce(value)
    dist.destroy_process_group()
    return said, value.item()


def test_training_goes_on_without_a_recording_when_there_is_no_room(tmp_path: Path) -> None:
    """One line says that collectives are not recorded and why, and no part of a file is left."""
    (line,), total = run(1, record_without_room, tmp_path)[0]
    assert total == 1
    assert line.startswith("collectives are not recorded: its file cannot be created ([Errno 27]")
    assert list(tmp_path.iterdir()) == []


def record_twice(folder: Path) -> tuple[str, str]:
    """What a second recording is told; then one after the other, and one into the folder itself."""
    dist.init_process_group("gloo")
    first = start_recording(ring_of(folder, 0), rank=0)
    with pytest.raises(RecordError) as refused:
        start_recording(ring_of(folder, 1), rank=0)
    dist.all_reduce(torch.ones(1))
    first.stop()
    first.stop()
    dist.all_reduce(torch.ones(2))
    said: list[str] = []
    start_recording(folder, rank=0, report=said.append).stop()
    with start_recording(ring_of(folder, 1), rank=0):
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    return str(refused.value), said[0]


def test_recording_can_be_stopped_and_started_again_but_not_twice_at_once(tmp_path: Path) -> None:
    """Two at once are refused with what to do; what happens between two recordings is in neither."""
    refused, said = run(1, record_twice, tmp_path)[0]
    assert "this process already records" in refused
    assert "Stop that recording first" in refused
    assert "is not a regular file" in said
    shapes = [[entry.inputs[0].shape for entry in log.collectives] for log in read_all(tmp_path, 2)]
    assert shapes == [[(1,)], [(3,)]]


def refuse_all(folder: Path) -> list[str]:
    """The texts of everything that `start_recording` refuses."""
    (folder / "notes.txt").write_text("not a ring")
    wrong: list[Callable[[], Any]] = [
        lambda: start_recording(folder / "notes.txt", rank=0),
    ]
    said = []
    for call in wrong:
        with pytest.raises(RecordError) as refused:
            call()
        said.append(str(refused.value))
    return said


def test_recording_refuses_wrong_arguments_and_files_that_are_no_ring(tmp_path: Path) -> None:
    """Each with the value that was found and what to give; the file stays as it is."""
    expected = ["starts with b'not a ri'"]
    said = run(1, refuse_all, tmp_path)[0]
    assert [text in found for text, found in zip(expected, said, strict=True)] == [True], said
    assert (tmp_path / "notes.txt").read_text() == "not a ring"
    assert os.listdir(tmp_path) == ["notes.txt"]
