# SPDX-License-Identifier: Apache-2.0
"""Values between the notebook and its ranks: push, pull, run."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddpilot import LaunchError, LaunchInterrupted, RankError, Session, ShipError
from tests.dist.session.conftest import Kept, pressing_stop

Start = Callable[..., Session]


class SlowToPack:
    """Takes half a minute to pickle."""

    def __reduce__(self) -> tuple[object, ...]:
        time.sleep(30)
        return int, ()


def _open_slowly() -> None:
    if os.environ["RANK"] == os.environ["SLOW_RANK"]:
        time.sleep(30)


class SlowToOpen:
    """Takes half a minute to unpickle on the rank in `SLOW_RANK`."""

    def __reduce__(self) -> tuple[object, ...]:
        return _open_slowly, ()


factor = 3


def scaled(value: torch.Tensor, *, by: int = 1) -> tuple[int, torch.Tensor]:
    """A function that uses a global of its module and the group."""
    import torch.distributed as dist

    dist.all_reduce(value)
    return dist.get_rank(), value * by * factor


def test_push_gives_each_rank_a_copy_of_its_own(start: Start) -> None:
    """A change to a tensor on one rank is visible neither in the notebook nor on other ranks."""
    session = start(2)
    mine = torch.zeros(3)
    session.push({"shared": mine, "number": 7})
    session.execute("shared += rank + 1; assert number == 7")
    assert [value.tolist() for value in session.pull("shared")] == [[1.0] * 3, [2.0] * 3]
    assert mine.tolist() == [0.0] * 3
    session.push({"number": 8}, ranks=[1])
    assert session.pull("number") == [7, 8]


def test_pull_brings_one_value_or_all_by_rank(start: Start) -> None:
    """Variables, expressions, tensors that are views, a model's state."""
    session = start(3)
    session.execute("import torch; rows = torch.arange(6.).reshape(2, 3)[:, 1] + rank\nnet = torch.nn.Linear(2, 1)")
    assert session.pull("rank * 2") == [0, 2, 4]
    assert session.pull("rows", rank=2).tolist() == [3.0, 6.0]
    assert set(session.pull("net.state_dict()", rank=0)) == {"weight", "bias"}


def test_large_tensors_do_not_go_through_the_message_channel(start: Start, view: Kept) -> None:
    """200 MB in both directions, and no message is larger than a page."""
    session = start(2)
    big = torch.arange(25_000_000, dtype=torch.float64)
    session.push({"big": big}, ranks=[0])
    back = session.pull("big + 1", rank=0)
    assert torch.equal(back, big + 1)
    assert view.messages == []


def test_pull_of_what_is_not_there_says_what_is(start: Start) -> None:
    """With the rank and a similar name; the group is unchanged."""
    session = start(2)
    session.execute("losses = [1]; group.barrier(); before = id(group.process_group)")
    with pytest.raises(LaunchError) as missing:
        session.pull("loses")
    assert str(missing.value) == (
        "pulling `loses` from ranks 0,1: there is no variable of that name. Did you mean `losses`?"
    )
    with pytest.raises(LaunchError, match="there is no variable of that name$"):
        session.pull("nope")  # not IPython's own `open`
    session.execute("if rank: only_there = 1")
    with pytest.raises(LaunchError, match="from rank 0: there is no variable of that name$"):
        session.pull("only_there")
    with pytest.raises(LaunchError, match="from rank 1: name 'nope' is not defined"):
        session.pull("losses + nope", rank=1)
    with pytest.raises(ShipError, match="cannot be pickled") as unpicklable:
        session.pull("(number for number in losses)", rank=1)
    assert unpicklable.value.path == "(number for number in losses)"
    with pytest.raises(RankError, match="ZeroDivisionError"):
        session.pull("1 / 0", rank=1)
    session.execute("assert id(group.process_group) == before")


def test_pull_of_a_ddp_model_says_what_to_pull(start: Start) -> None:
    """Its process group cannot leave its rank; the wrapped module and its weights can be pulled."""
    session = start(1)
    session.execute("import torch\nmodel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))")
    with pytest.raises(LaunchError, match=r"from rank 0: it is a DDP model.*, `model.module`, or its"):
        session.pull("model", rank=0)
    assert session.pull("model.module", rank=0).weight.shape == (1, 2)
    assert set(session.pull("model.module.state_dict()", rank=0)) == {"weight", "bias"}


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Run source text in ``__main__``, as a cell of the notebook."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    def run(source: str) -> dict[str, Any]:
        exec(source, vars(main))
        return vars(main)

    return run


def test_pull_of_the_sessions_own_names_is_refused(start: Start) -> None:
    """`group`, an attribute of the model in a DDP model, and the notebook's IPython."""
    session = start(1)
    session.execute("import torch\nddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))")
    with pytest.raises(LaunchError, match="it belongs to the session and cannot be pulled"):
        session.pull("group", rank=0)
    with pytest.raises(LaunchError, match=r"has no attribute 'in_features'. .*write `.module.in_features` in place"):
        session.pull("ddp.in_features", rank=0)
    with pytest.raises(LaunchError, match="has no attribute 'nosuch'$"):
        session.pull("ddp.nosuch", rank=0)
    with pytest.raises(LaunchError, match="`get_ipython` belongs to IPython, and every rank has its own"):
        session.push({"get_ipython": print})


def test_push_of_a_function_leaves_the_ranks_variables_alone(
    start: Start, view: Kept, cell: Callable[[str], dict[str, Any]]
) -> None:
    """It uses the rank's own `model`, `seen` and `rank`; only what a rank lacks comes with it, and follows later."""
    session = start(2)
    session.execute("model, seen, helper = [rank], 40, 'mine'")
    names = cell(
        "rank, model, seen, scale = 0, ['untrained'], 0, 2\n"
        "def helper(): return scale\n"
        "class Data:\n    def __len__(self): return seen\n"
        "data = Data()\n"
        "def report(): return rank, model, seen, helper, scale, len(data)\n"
    )
    session.push({"report": names["report"]})
    assert session.pull("report()") == [(rank, [rank], 40, "mine", 2, 40) for rank in (0, 1)]
    assert session.pull("(rank, model, seen, helper)") == [(rank, [rank], 40, "mine") for rank in (0, 1)]
    said = (
        "`report` uses `helper`, `model`, `seen`, and ranks 0,1 kept their own; `%ddp push helper model seen` replaces"
    )
    assert view.notes == [f"{said} them"]
    cell("scale = 3")
    session.push({"report": names["report"], "seen": 1})
    assert session.pull("report()", rank=1) == (1, [1], 1, "mine", 3, 1)
    assert view.notes[1:] == ["`report`, `seen` use `data`, and ranks 0,1 kept their own; `%ddp push data` replaces it"]


def test_run_has_each_ranks_own_rank(start: Start, cell: Callable[[str], dict[str, Any]]) -> None:
    """Whatever `rank` and `world_size` the notebook has from a version for one process; other globals are its own."""
    session = start(2)
    names = cell("rank, world_size, seen = 0, 1, 5\ndef where(): return rank, world_size, str(device), seen")
    session.execute("seen = 1")
    assert list(session.run(names["where"])) == [(0, 2, "cpu", 5), (1, 2, "cpu", 5)]
    assert session.pull("seen") == [1, 1]


def test_push_of_an_optimizer_without_its_model_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would update copies; pushed at once they belong together."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # torch's optimizers would set it
    session, model = start(1), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session.push({"model": model, "optimizer": optimizer})
    session.execute("assert optimizer.param_groups[0]['params'][0] is model.weight")
    with pytest.raises(LaunchError, match="`optimizer`: not all parameters that it updates are pushed with it"):
        session.push({"optimizer": optimizer})


def test_values_of_one_pull_share_what_they_share_on_the_rank(start: Start) -> None:
    """An optimizer pulled with its model updates that model; without it, it would update copies and is refused."""
    session = start(2)
    session.execute(
        "import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)"
    )
    model, optimizer, scheduler, again = session.pull(["model", "optimizer", "scheduler", "model"], rank=1)
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert scheduler.optimizer is optimizer
    assert again is model
    for pulled, one in session.pull(["optimizer", "model"]):
        assert pulled.param_groups[0]["params"][0] is one.weight
    with pytest.raises(LaunchError, match="`optimizer` from rank 0: not all parameters that it updates are pulled"):
        session.pull("optimizer", rank=0)
    with pytest.raises(LaunchError, match="`scheduler` from rank 0: the optimizer that it drives is not pulled"):
        session.pull(["model", "scheduler"], rank=0)
    with pytest.raises(LaunchError, match="pulling `modle` from rank 0: there is no variable of that name"):
        session.pull(["model", "modle"], rank=0)
    assert session.pull("optimizer.state_dict()", rank=0)["param_groups"][0]["lr"] == 0.1


def test_push_of_a_model_names_what_uses_the_earlier_one(
    start: Start, view: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The existing optimizer would continue to update the parameters of the replaced model."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")
    session, model = start(2), torch.nn.Linear(2, 1)
    session.push({"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    session.push({"model": model})
    said = "`optimizer` on the ranks still has the parameters of the earlier `model`; push both at once, or create"
    assert view.notes == [f"{said} it again on the ranks"]


def test_push_of_what_cannot_travel_is_named_before_anything_is_set(start: Start) -> None:
    """By its path."""
    session = start(2)
    with pytest.raises(ShipError, match=r"`config\['lock'\]`"):
        session.push({"number": 1, "config": {"lock": threading.Lock()}})
    session.execute("assert 'number' not in globals()")


def test_run_returns_every_ranks_value_and_leaves_variables_alone(start: Start) -> None:
    """The function has the notebook's globals, the ranks theirs."""
    session = start(2)
    session.execute("factor = 'mine'")
    results = session.run(scaled, torch.ones(2), by=2)
    assert [(rank, value.tolist()) for rank, value in results] == [(0, [12.0, 12.0]), (1, [12.0, 12.0])]
    assert session.pull("factor") == ["mine", "mine"]


def test_run_raises_the_ranks_exception_with_its_cause_and_recovers(start: Start) -> None:
    """As a cell does."""
    session = start(2)

    def fail() -> Any:
        import os

        import torch.distributed as dist

        if os.environ["RANK"] == "1":
            raise LookupError("no such sample")
        dist.barrier()

    session.execute("group.barrier()")
    with pytest.raises(RankError, match="rank 1 raised LookupError: no such sample") as caught:
        session.run(fail)
    assert isinstance(caught.value.__cause__, LookupError)
    assert "session/rank" not in str(caught.value)
    assert session.run(lambda: 5)[1] == 5


@pytest.mark.parametrize(
    ("value", "after_s", "said"),
    [(SlowToPack(), 0.3, "no variable was set on any rank"), (SlowToOpen(), 1.5, "set on rank 0, not set on rank 1")],
    ids=["packing", "opening"],
)
def test_a_stop_during_push_says_where_the_variable_is_set(
    start: Start, value: object, after_s: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line without a traceback; the next push works."""
    monkeypatch.setenv("SLOW_RANK", "1")
    session = start(2)
    with pytest.raises(LaunchInterrupted, match=f"^pushing x was interrupted: {said}$"), pressing_stop(after_s):
        session.push({"x": value})
    session.push({"x": 1})
    assert session.pull("x") == [1, 1]


class LostError(Exception):
    """Is unpickled as a number that cannot be parsed."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("x",)


def _raise_no_exception() -> None:
    raise LostError("the real trouble")


def test_run_raises_the_ranks_error_where_its_exception_cannot_be_rebuilt(start: Start, view: Kept) -> None:
    """With its text, and nothing is left open."""
    session = start(2)
    num_open = []
    for _ in range(3):
        with pytest.raises(RankError, match="LostError: the real trouble"):
            session.run(_raise_no_exception)
        num_open.append(len(os.listdir("/proc/self/fd")))
    assert any("could not be rebuilt here: ValueError" in note for note in view.notes)
    assert num_open[0] == num_open[2]


def test_run_shows_the_lines_of_a_function_that_is_in_no_file(start: Start) -> None:
    """A function of a notebook's cell, as `launch` shows it."""
    session = start(1)
    source = "def fail():\n    one = 1\n    return one / 0  # here\n"
    linecache.cache["<a cell>"] = (len(source), None, source.splitlines(keepends=True), "<a cell>")
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(source, "<a cell>", "exec"), names)
    try:
        with pytest.raises(RankError) as caught:
            session.run(names["fail"])  # type: ignore[arg-type]
    finally:
        del linecache.cache["<a cell>"]
    assert 'File "<a cell>", line 3, in fail\n    return one / 0  # here' in caught.value.rank_traceback
