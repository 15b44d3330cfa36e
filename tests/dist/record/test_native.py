# SPDX-License-Identifier: Apache-2.0
"""Compiled code writes repeated collectives, and they read as if Python had written each."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Linear, Module, Sequential
from torch.nn.parallel import DistributedDataParallel

from ddpilot.record.call_sites import SiteFinder
from ddpilot.record.collectives import native
from ddpilot.record.collectives.recording import SOURCE_VARIABLE
from ddpilot.record.flight_ring.log import Collective
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.flight_ring.writer import RingWriter
from tests.dist.record.ranks import my_rank, read_all, recorded, ring_of, run
from tests.dist.record.test_operators import calls

WIDTH = 300


pytestmark = pytest.mark.parametrize("recorder", ["native"], indirect=True, scope="module")


def counted(function: Callable[..., Any], num_calls: list[int]) -> Callable[..., Any]:
    """`function`, with its calls counted in `num_calls`."""

    def count(*args: Any) -> Any:
        num_calls[0] += 1
        return function(*args)

    return count


def facts(entry: Collective) -> tuple[Any, ...]:
    """All that a record says, but for times and threads."""
    where = entry.group and (entry.group.name, entry.group.incarnation, entry.group.ranks)
    what = (entry.op, entry.operator, entry.inputs, entry.outputs, entry.num_bytes, entry.is_async)
    return (*what, where, entry.seq, entry.root, entry.reduce_op, entry.line, entry.ddp, entry.state)


def call_all_often(folder: Path, source: str) -> None:
    """Every operator four times from the same line, in two groups, with two shapes, dtypes and reduce-ops in turn."""
    with recorded(folder, source=source):
        groups: list[Any] = [dist.group.WORLD, dist.new_group([0, 1])]
        for turn in range(4):
            for call in calls(my_rank()).values():
                with suppress(RuntimeError, NotImplementedError):  # gloo has not all of them
                    call(groups[0]).wait()
            value = torch.ones(2 + turn % 2, dtype=[torch.float32, torch.int64][turn // 2])
            for group, op in itertools.product(groups, (dist.ReduceOp.SUM, dist.ReduceOp.MAX)):
                dist.all_reduce(value, op, group)
                dist.broadcast(value, turn % 2, group)
                dist.all_reduce(value, op, group, async_op=True).wait()


def test_repeated_collectives_read_the_same_from_both_sources(tmp_path: Path) -> None:
    """Operation, group, number, tensors, root, reduce-op, line and end of each are what Python would have written."""
    seen = []
    for source in ("native", "kernels"):
        folder = tmp_path / source
        folder.mkdir()
        run(2, call_all_often, folder, source)
        logs = read_all(folder, 2)
        assert [log.first_fault for log in logs] == ["", ""]
        seen.append([[facts(entry) for entry in log.collectives] for log in logs])
    assert seen[0] == seen[1]
    assert len(seen[0][0]) > 100


def reduce_in_a_loop(folder: Path) -> int:
    """How many of 50 collectives from the same line Python wrote."""
    num_calls = [0]
    RingWriter.begin = counted(RingWriter.begin, num_calls)  # type: ignore[method-assign]
    with recorded(folder):
        for _ in range(50):
            dist.all_reduce(torch.ones(3))
    return num_calls[0]


def test_only_the_first_of_collectives_that_are_alike_is_pythons(tmp_path: Path) -> None:
    """All are in the ring, with their numbers and ends; Python wrote one."""
    assert run(1, reduce_in_a_loop, tmp_path)[0] == 1
    log = read_ring(ring_of(tmp_path, 0))
    assert [entry.seq for entry in log.collectives] == list(range(50))
    assert {entry.state for entry in log.collectives} == {"done"}
    assert [entry.index for entry in log.collectives] == list(range(1, 51))


class Other(Sequential):
    """A model of another name whose parameters are as large."""


def train_one_after_the_other(folder: Path, source: str) -> None:
    """Models of two classes, made and trained by the same lines, each in the memory that the one before has left."""
    with recorded(folder, source=source):
        kinds: list[Callable[..., Module]] = [Sequential, Other]
        for turn in range(6):
            module = kinds[turn % 2](Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH))
            model = DistributedDataParallel(module, bucket_cap_mb=0.3)
            for _ in range(4):
                model(torch.ones(2, WIDTH)).sum().backward()
            del model, module


def test_buckets_of_models_that_come_and_go_keep_their_names(tmp_path: Path) -> None:
    """Each gradient bucket is that of the model which is trained then, also where another's lay before."""
    seen = []
    for source in ("native", "kernels"):
        folder = tmp_path / source
        folder.mkdir()
        run(2, train_one_after_the_other, folder, source)
        seen.append([[(entry.op, entry.seq, entry.ddp) for entry in log.collectives] for log in read_all(folder, 2)])
    assert seen[0] == seen[1]
    assert {entry.model for _, _, entry in seen[0][0] if entry} == {"Sequential", "Other"}


def reduce_in_two_threads(folder: Path) -> None:
    """Each thread has its own group; 300 collectives in each, while new lines are described in between."""
    with recorded(folder):
        groups: list[Any] = [dist.group.WORLD, dist.new_group([0, 1])]

        def work(group: Any) -> None:
            for number in range(300):
                dist.all_reduce(torch.ones(1 + number % 40), group=group)

        threads = [threading.Thread(target=work, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_threads_with_a_group_each_are_numbered_by_group(tmp_path: Path) -> None:
    """No record is lost or written over, and each group counts its own collectives."""
    run(2, reduce_in_two_threads, tmp_path)
    for log in read_all(tmp_path, 2):
        by_group: dict[Any, list[int | None]] = {}
        for entry in log.collectives:
            assert entry.group is not None
            by_group.setdefault((entry.group.name, entry.group.incarnation), []).append(entry.seq)
        assert [seqs for seqs in by_group.values() if len(seqs) == 300] == [list(range(300))] * 2
        assert [entry.index for entry in log.collectives] == list(range(1, len(log.collectives) + 1))


def describe_more_than_there_is_room_for(folder: Path) -> None:
    """So many shapes that the pages of facts are started over many times; the last ones again and again."""
    with recorded(folder, page_bytes=4096, num_records=64):
        for number in range(400):
            dist.all_reduce(torch.ones(1, 1 + number))
            dist.all_reduce(torch.ones(2))


def test_what_a_page_held_is_described_again_when_it_is_started_over(tmp_path: Path) -> None:
    """No record refers to what was overwritten: the newest ones have shape, group and line."""
    run(1, describe_more_than_there_is_room_for, tmp_path)
    newest = read_ring(ring_of(tmp_path, 0)).collectives[-10:]
    shapes = [entry.inputs[0].shape for entry in newest]
    assert shapes == [shape for number in range(396, 401) for shape in ((1, number), (2,))]
    assert all(entry.group and entry.line and entry.line.text.startswith("dist.all_reduce") for entry in newest)


def interrupt_the_search(folder: Path) -> float:
    """Ctrl-C comes while the compiled code asks Python about a file; a sum of three all_reduces."""
    original = SiteFinder.kind_of
    num_calls = itertools.count(1)

    def interrupted(self: SiteFinder, file: str) -> int:
        if next(num_calls) == 1:
            raise KeyboardInterrupt
        return original(self, file)

    SiteFinder.kind_of = interrupted  # type: ignore[method-assign]
    total = torch.zeros(1)
    with recorded(folder):
        for number in range(3):
            value = torch.ones(1)
            try:
                dist.all_reduce(value)
            except KeyboardInterrupt:
                assert number == 0
                total += 10
            total += value
    return total.item()


def test_interrupt_while_a_line_is_looked_for_reaches_the_program(tmp_path: Path) -> None:
    """The collective runs, the program has its KeyboardInterrupt, and no record stays open."""
    assert run(1, interrupt_the_search, tmp_path)[0] == 13
    assert {entry.state for entry in read_ring(ring_of(tmp_path, 0)).collectives} == {"done"}


def break_the_search(folder: Path) -> tuple[float, list[str]]:
    """Every look at a file fails; a sum of three all_reduces, and what was said."""

    def broken(self: SiteFinder, file: str) -> int:
        raise ZeroDivisionError("on purpose")

    SiteFinder.kind_of = broken  # type: ignore[method-assign]
    said: list[str] = []
    total = torch.zeros(1)
    with recorded(folder, report=said.append):
        for _ in range(3):
            value = torch.ones(1)
            dist.all_reduce(value)
            total += value
    return total.item(), said


def test_error_in_the_search_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    """As of any other part of the recording."""
    total, said = run(1, break_the_search, tmp_path)[0]
    assert total == 3
    assert len(said) == 1
    assert "ZeroDivisionError: on purpose" in said[0]


def record_with_what_there_is(folder: Path, path: Path) -> tuple[str, list[str]]:
    """What is built cannot be loaded; what records instead, and what was said."""
    os.environ.pop(SOURCE_VARIABLE, None)
    native.built_path = lambda: path
    said: list[str] = []
    with recorded(folder, report=said.append) as recording:
        dist.all_reduce(torch.ones(1))
    return recording.source, said


def test_what_cannot_be_loaded_is_said_once_and_python_records(tmp_path: Path) -> None:
    """As where it was built on another machine that shares the home folder."""
    path = tmp_path / "recorder.so"
    path.write_text("no library")
    source, said = run(1, record_with_what_there_is, tmp_path, path)[0]
    assert source == "kernels"
    assert len(said) == 1
    assert said[0].startswith("the compiled part of recording cannot be used, the one in Python is (")
    assert [entry.state for entry in read_ring(ring_of(tmp_path, 0)).collectives] == ["done"]
