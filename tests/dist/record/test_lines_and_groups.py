# SPDX-License-Identifier: Apache-2.0
"""The user's line, the group and the number of a collective, wherever it comes from."""

from __future__ import annotations

import ctypes
import linecache
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import AllreduceOptions
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel

from ddpilot.record.flight_ring.log import Collective
from tests.dist.record.ranks import matchable, my_rank, read_all, recorded, run

CELL = "<ipython-input-7-0badcafe>"
CELL_SOURCE = "def share(tensor):\n    dist.all_reduce(tensor)\n"


class Weighted(torch.nn.Module):
    """Sends its gradient around by itself, from within the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.weight.register_hook(self.average)  # type: ignore[no-untyped-call]

    def average(self, gradient: torch.Tensor) -> torch.Tensor:
        """A hook of the user's own."""
        dist.all_reduce(gradient)
        return gradient / 2

    def forward(self) -> torch.Tensor:
        """Something with a gradient."""
        return self.weight.sum()


def collectives_from_everywhere(folder: Path) -> None:
    """One after the other: a line, a cell, an object, a hook, a thread, a functional one, a library's."""
    with recorded(folder):
        dist.barrier()
        namespace: dict[str, Any] = {"dist": dist}
        linecache.cache[CELL] = (len(CELL_SOURCE), None, CELL_SOURCE.splitlines(keepends=True), CELL)
        exec(compile(CELL_SOURCE, CELL, "exec"), namespace)
        namespace["share"](torch.ones(1))
        dist.all_gather_object([None, None], {"loss": 1.0})
        Weighted()().backward()
        thread = threading.Thread(target=lambda: dist.broadcast(torch.ones(5), 1))
        thread.start()
        thread.join()
        functional.all_reduce(torch.ones(6), "max", [0, 1]).sum().item()


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Collective, ...]:
    """What rank 0 recorded of them."""
    folder = tmp_path_factory.mktemp("lines")
    run(2, collectives_from_everywhere, folder)
    first, second = read_all(folder, 2)
    assert matchable(first) == matchable(second)
    return first.collectives


def lines(entries: tuple[Collective, ...]) -> list[tuple[str, str, str, str]]:
    """Operation, text, function and library function of each."""
    return [(entry.op, entry.line.text, entry.line.function, entry.line.via) for entry in entries if entry.line]


def test_lines_are_the_users_own(entries: tuple[Collective, ...]) -> None:
    """Of this file, with the text and the function around it, and with what it called."""
    found = lines(entries)
    outer = "collectives_from_everywhere"
    assert found[0] == ("barrier", "dist.barrier()", outer, "barrier")
    assert found[2][1:] == ('dist.all_gather_object([None, None], {"loss": 1.0})', outer, "all_gather_object")
    assert found[3] == found[2]
    assert found[4] == ("all_reduce", "dist.all_reduce(gradient)", "average", "all_reduce")
    assert found[6][0] == "all_reduce"
    assert "functional.all_reduce" in found[6][1]
    assert all(entry.line.file == __file__ for entry in entries[:1] + entries[2:] if entry.line)


def test_lines_of_cells_come_with_their_text(entries: tuple[Collective, ...]) -> None:
    """A cell's line is in no file, so its text travels in the ring."""
    line = entries[1].line
    assert line is not None
    assert (line.file, line.line, line.function, line.text) == (CELL, 2, "share", "dist.all_reduce(tensor)")


def test_threads_are_told_apart(entries: tuple[Collective, ...]) -> None:
    """The thread of a collective is the operating system's, so that its stack can be found from outside."""
    assert entries[5].op == "broadcast"
    assert entries[5].thread != entries[0].thread
    assert {entry.thread for entry in entries if entry is not entries[5]} == {entries[0].thread}


def collectives_of_several_groups(folder: Path) -> None:
    """The default group, a smaller one, both again, then a default group anew while a model stays on the old one."""
    with recorded(folder):
        pair = dist.new_group([0, 2], group_desc="the even ones")
        dist.all_reduce(torch.ones(1))
        if my_rank() != 1:
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MIN, group=pair)
        dist.all_reduce(torch.ones(3))
        model = DistributedDataParallel(Linear(2, 1))
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(4))
        model(torch.ones(1, 2)).sum().backward()
        dist.all_reduce(torch.ones(5))


def test_groups_number_their_own_collectives(tmp_path: Path) -> None:
    """Each group counts for itself and knows its ranks; one that takes over a destroyed group's name is another one."""
    run(3, collectives_of_several_groups, tmp_path)
    logs = read_all(tmp_path, 3)
    assert matchable(logs[0]) == matchable(logs[2])
    assert [log.first_fault for log in logs] == [""] * 3
    by_size = {entry.inputs[0].shape[0]: entry for entry in logs[2].collectives if entry.op == "all_reduce"}
    small = by_size[2].group
    assert small is not None
    assert (small.ranks, small.rank, small.size, small.description) == ((0, 2), 1, 2, "the even ones")
    assert small.backend.startswith("cpu:gloo")
    numbers = {size: (entry.group.name, entry.group.incarnation, entry.seq) for size, entry in by_size.items()
               if entry.group}  # fmt: skip
    assert (numbers[1], numbers[4], numbers[5]) == (("0", 1, 0), ("0", 2, 0), ("0", 2, 1))
    reduced = [entry for entry in logs[2].collectives if entry.ddp and entry.ddp.what == "bucket"]
    assert [(entry.group.name, entry.group.incarnation) for entry in reduced if entry.group] == [("0", 1)]


def reduce_once(value: torch.Tensor) -> None:
    """Is called from several lines."""
    dist.all_reduce(value)


def reduce_from_two_lines(folder: Path) -> list[int]:
    """One helper from two lines, in turn; which lines they are."""
    with recorded(folder):
        for _ in range(3):
            reduce_once(torch.ones(2))
            reduce_once(torch.ones(2))
    first = reduce_from_two_lines.__code__.co_firstlineno
    return [first + 4, first + 5]


def test_the_calls_that_led_to_a_line_are_recorded_with_it(tmp_path: Path) -> None:
    """Also where the collective is one of many from the same line."""
    (lines,) = run(1, reduce_from_two_lines, tmp_path)
    entries = read_all(tmp_path, 1)[0].collectives
    callers = [entry.line.callers[0] for entry in entries if entry.line is not None]
    assert [each.line for each in callers] == lines * 3
    assert {(each.function, each.text) for each in callers} == {("reduce_from_two_lines", "reduce_once(torch.ones(2))")}


def reduce_in_threads_of_c(folder: Path) -> None:
    """A thread that no Python has started asks for a collective, as the backward engine of an accelerator does."""
    pthread = ctypes.CDLL(None)
    with recorded(folder):
        group: Any = dist.group.WORLD
        dist.all_reduce(torch.ones(3))
        for _ in range(2):
            # Both are functions of C++, so that there is no frame of Python's on the thread's stack.
            begin = ctypes.CFUNCTYPE(None)(partial(group.allreduce, [torch.ones(7)], AllreduceOptions()))
            thread = ctypes.c_ulong()
            assert pthread.pthread_create(ctypes.byref(thread), None, begin, None) == 0
            assert pthread.pthread_join(thread, None) == 0
        dist.all_reduce(torch.ones(4))


def test_a_thread_without_a_frame_of_python_has_its_collectives_recorded(tmp_path: Path) -> None:
    """They are gradients, for which the main thread waits at its line, and count as on any rank."""
    run(2, reduce_in_threads_of_c, tmp_path)
    for log in read_all(tmp_path, 2):
        assert log.num_faults == 0
        assert [(each.seq, each.inputs[0].shape) for each in log.collectives] == [
            *((0, (3,)), (1, (7,)), (2, (7,)), (3, (4,)))
        ]
        for each in log.collectives[1:3]:
            assert each.ddp is not None
            assert each.ddp.what == "gradients"
            assert each.line is not None
            assert each.line.function == "reduce_in_threads_of_c"
