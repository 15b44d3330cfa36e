# SPDX-License-Identifier: Apache-2.0
"""Record next to compiled graphs, forked workers, cells, signals and many groups."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ddpilot.record.collectives.start_stop import start_recording
from ddpilot.record.flight_ring.reader import read_ring
from tests.dist.record.ranks import matchable, my_rank, read_all, recorded, ring_of, run


def average(tensor: torch.Tensor) -> torch.Tensor:
    """Something to compile: a functional collective between two computations."""
    group = dist.group.WORLD
    assert group is not None
    total: torch.Tensor = functional.all_reduce(tensor * 2, "sum", group)
    return total / 4


def train_compiled(folder: Path) -> tuple[list[float], int]:
    """A compiled function with a collective in it, and a compiled model in DDP.

    The function's values, and the number of graph breaks.
    """
    with recorded(folder):
        compiled = torch.compile(average, backend="aot_eager", fullgraph=True)
        values = [compiled(torch.ones(3) * (my_rank() + step)).sum().item() for step in range(3)]
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.compile(Linear(3, 1), backend="aot_eager"))
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
        counters = torch._dynamo.utils.counters
    return values, sum(counters["graph_break"].values())


def test_collectives_of_compiled_graphs_are_recorded(tmp_path: Path) -> None:
    """Under torch.compile the values are right, nothing breaks the graph because of us, and every one is recorded."""
    for values, num_breaks in run(2, train_compiled, tmp_path):
        assert values == [1.5 * (2 * step + 1) for step in range(3)]
        assert num_breaks == 0
    logs = read_all(tmp_path, 2)
    assert matchable(logs[0]) == matchable(logs[1])
    assert [log.first_fault for log in logs] == ["", ""]
    reduced = [entry for entry in logs[0].collectives if entry.op == "all_reduce" and not entry.ddp]
    assert [entry.inputs[0].shape for entry in reduced] == [(3,)] * 3
    # Of a compiled function its first line is known: that is the only one its compiled code has.
    assert {(entry.line.function, entry.line.file) for entry in reduced if entry.line} == {("average", __file__)}
    assert len([entry for entry in logs[0].collectives if entry.ddp and entry.ddp.what == "bucket"]) == 3


def step_with_a_break(tensor: torch.Tensor) -> torch.Tensor:
    """Something to compile that Dynamo has to leave in between, for a collective that it does not know."""
    doubled = tensor * 2
    dist.barrier()
    return doubled + 1


def break_a_graph(folder: Path) -> tuple[float, set[str]]:
    """A compiled function's value, and the functions that Dynamo compiled for it."""
    torch._dynamo.reset()
    with recorded(folder):
        value = torch.compile(step_with_a_break, backend="eager")(torch.ones(2)).sum().item()
    return value, {str(metrics.co_name) for metrics in torch._dynamo.utils.get_compilation_metrics()}


def test_recording_is_not_compiled_itself(tmp_path: Path) -> None:
    """Where a compiled function calls a collective directly, Dynamo sees our frames too, and leaves them alone."""
    for value, names in run(2, break_a_graph, tmp_path):
        assert value == 6
        assert {name for name in names if not name.startswith("torch_dynamo_resume")} == {"step_with_a_break"}
    for log in read_all(tmp_path, 2):
        assert [(entry.op, entry.line and entry.line.file) for entry in log.collectives] == [("barrier", __file__)]
        assert log.first_fault == ""


class Busy(Dataset[torch.Tensor]):
    """Its items are made in forked workers, which run a collective of a group of their own."""

    def __len__(self) -> int:
        """Two batches of two."""
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        """The worker's process, and what it was when it ran a collective."""
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        value = torch.ones(1)
        dist.all_reduce(value)
        return torch.tensor([os.getpid(), int(value)])


def load_in_workers(folder: Path) -> tuple[int, list[list[int]]]:
    """Workers are forked while the recording is on; this process's number, and theirs with their values."""
    dist.init_process_group("gloo")
    dist.destroy_process_group()
    with start_recording(ring_of(folder, my_rank()), rank=my_rank()):
        loader = DataLoader(Busy(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        rows = [row.tolist() for batch in loader for row in batch]
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        dist.all_reduce(torch.ones(2))
        dist.destroy_process_group()
    return os.getpid(), rows


def test_forked_workers_never_write_into_the_ring(tmp_path: Path) -> None:
    """What DataLoader workers do, also collectives of their own, leaves no trace in the ring of their parent."""
    pid, rows = run(1, load_in_workers, tmp_path)[0]
    assert len(rows) == 4
    assert all(worker != pid and value == 1 for worker, value in rows)
    log = read_ring(ring_of(tmp_path, 0))
    assert log.pid == pid
    assert [entry.inputs[0].shape for entry in log.collectives] == [(2,)]
    assert {entry.thread for entry in log.collectives} == {pid}
    assert log.closed_ns is not None


CELL = "import torch, torch.distributed as dist\n\ndist.all_reduce(torch.ones(3))\n"


def run_a_cell(folder: Path) -> str:
    """IPython runs a cell with a collective; the file name that Python has for it."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    settings = Config()
    settings.HistoryManager.enabled = False
    with recorded(folder):
        shell = InteractiveShell.instance(config=settings, ipython_dir=str(folder / "ipython"))
        assert shell.run_cell(CELL, store_history=True).success  # type: ignore[no-untyped-call]
        assert shell.run_cell(CELL, store_history=True).success  # type: ignore[no-untyped-call]
    return str(shell.user_ns["dist"].__name__)


def test_line_of_a_cell_reads_as_in_a_traceback(tmp_path: Path) -> None:
    """The file of a cell's line is the cell's name, whatever IPython compiles it under, and its text is there."""
    run(1, run_a_cell, tmp_path)
    lines = [entry.line for entry in read_ring(ring_of(tmp_path, 0)).collectives]
    assert [line.place for line in lines if line] == ["Cell In[1]:3", "Cell In[2]:3"]
    assert {(line.text, line.function) for line in lines if line} == {("dist.all_reduce(torch.ones(3))", "<module>")}


def use_many_groups(folder: Path) -> None:
    """Groups come and go, more of them than the ring has records; every one sends with a tag of its own."""
    with recorded(folder, num_records=16, page_bytes=4096):
        for number in range(40):
            group = dist.new_group([0, 1], group_desc=f"number {number}")
            if my_rank() == 0:
                dist.send(torch.ones(number + 1), 1, group=group, tag=number)
            else:
                dist.recv(torch.ones(number + 1), 0, group=group, tag=number)
            dist.all_reduce(torch.ones(2), group=group)
            dist.destroy_process_group(group)


def test_newest_records_are_whole_when_the_ring_has_gone_round(tmp_path: Path) -> None:
    """A small ring holds the newest records with everything that they refer to, however often it was overwritten."""
    run(2, use_many_groups, tmp_path)
    for log in read_all(tmp_path, 2):
        assert len(log.collectives) == 16
        assert [entry.index for entry in log.collectives] == list(range(log.num_begun - 15, log.num_begun + 1))
        assert (log.num_torn, log.first_fault) == (0, "")
        assert {entry.op for entry in log.collectives} <= {"send", "recv", "barrier", "all_reduce"}
        assert all(entry.line and entry.line.file == __file__ for entry in log.collectives)
        sent = [entry for entry in log.collectives if entry.is_p2p]
        assert [entry.inputs[0].shape[0] if entry.inputs else entry.outputs[0].shape[0] for entry in sent] == [
            (entry.tag or 0) + 1 for entry in sent
        ]
        assert sent[-1].tag == 39
        assert sent[-1].group is not None
        assert sent[-1].group.description == "number 39"


def test_threads_write_side_by_side(tmp_path: Path) -> None:
    """Collectives of several threads, each in a group of its own, are all there, numbered without a gap."""
    num_threads = 3
    run(2, reduce_in_threads, tmp_path, num_threads)
    for log in read_all(tmp_path, 2):
        assert (log.num_torn, log.first_fault) == (0, "")
        assert [entry.index for entry in log.collectives] == list(range(1, log.num_begun + 1))
        by_group: dict[str, list[int | None]] = {}
        for entry in log.collectives:
            if entry.group and entry.inputs and entry.inputs[0].shape == (5,):
                by_group.setdefault(entry.group.name, []).append(entry.seq)
        assert list(by_group.values()) == [list(range(100))] * num_threads
        assert len({entry.thread for entry in log.collectives}) == num_threads + 1


def reduce_in_threads(folder: Path, num_threads: int) -> None:
    """As many threads as groups, 100 times each."""

    def reduce_often(group: dist.ProcessGroup) -> None:
        for _ in range(100):
            dist.all_reduce(torch.ones(5), group=group)

    with recorded(folder):
        dist.barrier()
        groups = [dist.new_group([0, 1]) for _ in range(num_threads)]
        threads = [threading.Thread(target=reduce_often, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
