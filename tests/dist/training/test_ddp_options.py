# SPDX-License-Identifier: Apache-2.0
"""The options of DDP on real ranks: what was chosen prevents, what is proposed, and what crosses the wire."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from benchmarks.small_models import loss_fn, make_data, make_model
from ddpilot import RankError
from ddpilot.errors import LoopError
from ddpilot.record.collectives.start_stop import start_recording
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.training.loop import Loop
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.models.explain import Explanation
from tests.dist.training.bodies import launch, launch_unwatched

X = torch.arange(48, dtype=torch.float32).reshape(24, 2) / 24


class Branching(nn.Module):
    """Two layers, of which an update uses the second one or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.uses_second = nn.Linear(2, 2), nn.Linear(2, 2), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, 2)."""
        return torch.as_tensor(self.second(self.first(x)) if self.uses_second else self.first(x))


class Boxed(Branching):
    """Returns an object that DDP cannot look into."""

    def forward(self, x: torch.Tensor) -> Any:
        """x: (samples, 2)."""
        return SimpleNamespace(y=super().forward(x))


# Which of 12 updates use the second layer, on which rank.
ALWAYS = {rank: [True] * 12 for rank in (0, 1)}
NEVER = {rank: [False] * 12 for rank in (0, 1)}
LATE = {rank: [True] * 11 + [False] for rank in (0, 1)}
ON_ONE_RANK = {0: [True] * 12, 1: [False] * 12}


def train_branching(
    uses: Mapping[int, list[bool]], make: type[Branching] = Branching, **options: Any
) -> tuple[Explanation, list[float]]:
    """12 updates; what the loop explains then, and the weights."""
    loop = Loop(seed=2)
    model = make()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    for number, (x,) in enumerate(loop.batches(loop.loader(TensorDataset(X), global_batch_size=2))):
        model.module.uses_second = uses[loop.rank][number]
        with loop.accumulate(model):
            output = model(x)
            loop.backward(getattr(output, "y", output).pow(2).mean())
        loop.step(optimizer)
    return loop.explain(), torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def explain_all() -> dict[str, Any]:
    """Explanations of the four, searching for unused parameters, and of two without; errors as their text."""
    found: dict[str, Any] = {}
    for name, uses in {"always": ALWAYS, "never": NEVER, "late": LATE, "on one rank": ON_ONE_RANK}.items():
        found[name] = train_branching(uses, find_unused_parameters=True)
    found["default"] = train_branching(ALWAYS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_FIND_UNUSED_PARAMETERS", "1")
        found["by the variable"] = train_branching(LATE)
    for name, uses, options in (
        ("late by default", LATE, {}),
        ("late in a static graph", LATE, {"static_graph": True}),
        ("new in a static graph", {rank: [False, True] * 6 for rank in (0, 1)}, {"static_graph": True}),
        ("hidden in an object", ALWAYS, {"find_unused_parameters": True, "make": Boxed}),
    ):
        with pytest.raises(LoopError) as caught:
            train_branching(uses, **options)
        found[name] = str(caught.value)
    return found


@pytest.fixture(scope="module")
def explained() -> list[dict[str, Any]]:
    """What each of two ranks was told."""
    return list(launch(2, explain_all))


def test_explain_says_the_same_on_all_ranks_with_reasons_and_figures(explained: list[dict[str, Any]]) -> None:
    """Each option with its value and why; gradients in bytes and milliseconds; as text and as HTML."""
    explanation, _ = explained[0]["default"]
    assert explanation == explained[1]["default"][0]
    text = str(explanation)
    assert "Branching: DistributedDataParallel over 2 ranks" in text
    assert "find_unused_parameters = False  no search through the graph in each forward pass" in text
    assert "gradients: 48 bytes in 1 bucket (48 bytes) in the order of the gradients" in text
    assert "times: up to update 10, on the slowest rank" in text
    assert "<code>static_graph = False</code>" in explanation._repr_html_()
    assert not explanation.proposals


def test_explain_proposes_only_what_every_rank_and_every_update_bear_out(explained: list[dict[str, Any]]) -> None:
    """Not where a branch was taken late or on one rank only; and nothing of it is switched on."""

    def proposed(name: str) -> dict[str, str]:
        findings = explained[0][name][0].proposals
        return {one.code: " ".join((one.summary, *one.evidence, one.fix)) for one in findings}

    assert list(proposed("always")) == ["DDP502"]
    assert "Omit it if no parameter is left out later or on one rank only" in proposed("always")["DDP502"]
    assert list(proposed("never")) == ["DDP503"]
    assert "second.weight, second.bias" in proposed("never")["DDP503"]
    assert proposed("late") == proposed("on one rank") == {}
    assert "the parameters in use have changed on ranks 0,1: find_unused_parameters=True" in str(
        explained[0]["late"][0]
    )
    assert "rank 1 left out second.weight, second.bias" in str(explained[0]["on one rank"][0])
    for rank in explained:
        assert rank["late"][1] == explained[0]["late"][1] != rank["always"][1]
        assert rank["on one rank"][1] == explained[0]["on one rank"][1]
        assert rank["by the variable"][1] == rank["late"][1]
        assert "set by DDP_FIND_UNUSED_PARAMETERS=1; a search through" in str(rank["by the variable"][0])


def test_a_branch_that_is_taken_late_is_an_error_that_names_the_parameters(explained: list[dict[str, Any]]) -> None:
    """In that update, before the weights change: torch tells of it in the next forward, with numbers."""
    for rank, said in enumerate(explained):
        assert f"[rank {rank}] synchronising gradients in batch" in said["late by default"]
        assert ": on this rank the backward pass left out" in said["late by default"]
        assert "parameters second.weight, second.bias of Branching" in said["late by default"]
        assert "prepare(..., find_unused_parameters=True), or DDP_FIND_UNUSED_PARAMETERS=1" in said["late by default"]
        assert "use find_unused_parameters=True instead" in said["late in a static graph"]
        assert "got its gradient twice in one backward pass" in said["hidden in an object"]
        assert "must be in the model's output: return tensors" in said["hidden in an object"]
        assert (
            "uses a parameter that the first one did not, and `static_graph` is True" in said["new in a static graph"]
        )


def test_a_branch_on_one_rank_only_is_an_error_of_that_rank() -> None:
    """The other one waits for it in the backward pass; torch's error there would be of a closed connection."""
    with pytest.raises(RankError, match="left out parameters second.weight, second.bias of Branching") as caught:
        launch(2, train_branching, ON_ONE_RANK)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, LoopError)


def make_normed() -> nn.Module:
    """A model with buffers."""
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def look_unequally(how: str, prepared: bool) -> list[list[float]]:
    """Two epochs with forwards through the wrapper that ranks run unequally often; buffers of each rank at the end.

    `how`: "rank 0 looks": it alone runs a forward between updates; "validation": rank 1 has no batch to validate;
    "equally": neither.
    """
    loop = Loop(timeout_s=None if prepared else 6.0)
    model = make_normed()
    model = loop.prepare(model) if prepared else DistributedDataParallel(model)
    x = X[12 * loop.rank :][:12]
    for _ in range(2):
        for part in (x[:6], x[6:]):
            model(part).pow(2).mean().backward()
            if how == "rank 0 looks" and loop.rank == 0:
                model(part)
        model.eval()
        with torch.no_grad():
            if how == "validation" and loop.rank == 0:
                model(x)
        model.train()
    loader = loop.loader(TensorDataset(X), global_batch_size=8)
    loop.evaluate(model, loader, {"mean": lambda y: y}, forward=lambda model, batch: (model(batch[0]),))
    return [buffer.tolist() for name, buffer in unwrap(model).named_buffers() if "running" in name]


def look_in_a_loop(when: str) -> list[float]:
    """Rank 0 looks with gradients before or after an update, and all ranks have a collective soon after it."""
    loop = Loop(timeout_s=20)
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for (x,) in loop.batches(loop.loader(TensorDataset(X), global_batch_size=8)):
        with loop.accumulate(model):
            loss = model(x).pow(2).mean()
            loop.backward(loss)
        for moment in ("before", "after"):
            if when == moment and loop.rank == 0:
                model(x)
            if moment == "before":
                loop.step(optimizer)
        losses.append(loop.reduce(loss).item())
    return losses


def look_all_ways() -> list[Any]:
    """Prepared as the loop does."""
    found: list[Any] = [look_unequally(how, prepared=True) for how in ("rank 0 looks", "validation")]
    return found + [look_in_a_loop(when) for when in ("before", "after")]


def test_forwards_that_ranks_run_unequally_often_wait_for_nobody() -> None:
    """As prepared: both ranks come to the end with the same losses, and the same buffers after an evaluation."""
    zero, one = launch(2, look_all_ways)
    assert zero == one


def look_plainly(how: str) -> None:
    """With DDP as it is by itself: first as often on both ranks, which goes well, then not."""
    look_unequally("equally", prepared=False)
    print("equal forwards came through", flush=True)
    look_unequally(how, prepared=False)


@pytest.mark.parametrize("how", ["rank 0 looks", "validation"])
def test_forwards_that_ranks_run_unequally_often_end_plain_ddp(how: str) -> None:
    """A rank's buffers meet another collective of the other one: an abort, or a wait until the group's limit."""
    with pytest.raises(RankError) as caught:
        launch_unwatched(2, look_plainly, how)
    assert "equal forwards came through" in "".join(caught.value.last_lines)
    cause = caught.value.__cause__  # gloo has several words for it
    assert caught.value.signal_name == "SIGABRT" or type(cause) in (RuntimeError, dist.DistBackendError)


def train_compressed(comm: Any, folder: Path) -> float:
    """The mean loss of the last epoch; the ring of each rank in `folder`."""
    loop = Loop(seed=1)
    with start_recording(folder / f"{comm}{loop.rank}", rank=loop.rank):
        model = make_model("mlp")
        model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), comm=comm)
        total = 0.0
        for epoch in loop.epochs(8):
            for x, y in loop.batches(loop.loader(make_data("mlp"), global_batch_size=24, shuffle=True)):
                with loop.accumulate(model):
                    loss = loss_fn(model(x), y)
                    loop.backward(loss)
                loop.step(optimizer)
                total += loop.reduce(loss).item() if epoch == 7 else 0.0
    return total / 5


def overflow() -> str:
    """What is said of gradients that fp16 cannot hold."""
    loop = Loop()
    model = nn.Linear(2, 1)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), comm="fp16")
    with pytest.raises(ArithmeticError) as caught:  # noqa: PT012 - which of the calls raises it is open
        for (x,) in loop.batches(loop.loader(TensorDataset(X), global_batch_size=8)):
            with loop.accumulate(model):
                loop.backward(model(x).sum() * 1e6)
            loop.step(optimizer)
    return str(caught.value)


def compress_all(folder: Path) -> dict[str, Any]:
    """The losses, by what gradients cross in, and the error of an overflow."""
    return {**{str(comm): train_compressed(comm, folder) for comm in (None, "bf16", "fp16")}, "overflow": overflow()}


def gradient_bytes(log: RankLog) -> tuple[set[str], int]:
    """Dtypes and bytes of the gradients that a rank handed over in the first 30 updates."""
    found = [one for one in log.collectives if one.ddp and one.ddp.what in ("bucket", "gradients")]
    return {tensor.dtype for one in found for tensor in one.inputs}, sum(one.num_bytes for one in found[:30])


def test_comm_halves_the_bytes_and_trains_as_well(tmp_path: Path) -> None:
    """By the flight ring: half of fp32's bytes; the loss that is reached differs by less than 2 %."""
    losses = launch_unwatched(2, compress_all, tmp_path)
    logs = {comm: [read_ring(tmp_path / f"{comm}{rank}") for rank in (0, 1)] for comm in ("None", "bf16", "fp16")}
    for rank in (0, 1):
        dtypes, plain = gradient_bytes(logs["None"][rank])
        assert dtypes == {"float32"}
        assert plain == 30 * 4 * (8 * 16 + 16 + 16 * 5 + 5)
        assert gradient_bytes(logs["bf16"][rank]) == ({"bfloat16"}, plain // 2)
        assert gradient_bytes(logs["fp16"][rank]) == ({"float16"}, plain // 2)
    for comm in ("bf16", "fp16"):
        assert losses[0][comm] == losses[1][comm] != losses[0]["None"]
        assert losses[0][comm] == pytest.approx(losses[0]["None"], rel=0.02)
    assert "their sum over ranks is not finite, though every rank's loss was finite" in losses[1]["overflow"]
    assert 'Gradients are all-reduced in fp16 (max 65,504); comm="bf16" has the range of fp32.' in losses[1]["overflow"]
