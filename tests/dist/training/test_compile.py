# SPDX-License-Identifier: Apache-2.0
"""`compile=`: the numbers of an uncompiled model, in DDP and sharded, at any number of ranks, and in checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpilot
from benchmarks.small_models import make_data, make_model
from ddpilot.training.loop import Loop
from ddpilot.training.models.sharding import ParameterSharding
from tests.dist.training.bodies import launch
from tests.soak import IS_SOAK, often, soak

LAYERS = ParameterSharding(layers=nn.Linear)
AOT = {"backend": "aot_eager"}
EAGER = {"backend": "eager"}
"""Traces a model and computes what was traced without a backward pass of its own, which takes less time."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one graph": {"compile": {**AOT, "fullgraph": True}},
    "buckets of 1 MiB": {"compile": AOT, "bucket_cap_mb": 1},
    "static graph": {"compile": EAGER, "static_graph": True},
    "unused": {"compile": EAGER, "find_unused_parameters": True},
    "layers": {"compile": EAGER, "shard": LAYERS},
    "sharded whole": {"compile": {**AOT, "dynamic": True}, "shard": "parameters"},
}


def train(options: dict[str, Any], folder: Path | None = None, num_epochs: int = 2) -> list[float]:
    """The weights, their average, a metric, outputs and the number of findings after two epochs of ragged batches."""
    torch.set_default_dtype(torch.float64)
    torch._dynamo.reset()
    loop = Loop(seed=4, accumulate=2, progress=False, checkpoint_dir=folder)
    model = make_model("mlp")
    names = list(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = loop.prepare(model, optimizer, **options)
    average = None if folder is not None else loop.average(model, 0.5)
    loader = loop.loader(make_data("mlp", 25), global_batch_size=12)  # a batch of one sample: some ranks have none
    for _ in loop.epochs(num_epochs):
        for x, y in loop.batches(loader):
            with loop.accumulate(model):
                loop.backward(nn.functional.cross_entropy(model(x), y))
            loop.step(optimizer)
    share = loop.evaluate(model, loader, {"p": lambda out, y: out.softmax(-1).amax(-1)})["p"]
    outputs = loop.predict(model, loader, on_all_ranks=True)
    state = ddpilot.full_state(model) if "shard" in options else ddpilot.unwrap(model).state_dict()
    if state and loop.rank == 0:
        assert list(state) == names
    learnt = [] if average is None else [one.sum().item() for one in ddpilot.full_state(average.module).values()]
    return [share, outputs.sum().item(), outputs.abs().max().item(), float(len(loop.findings)), *learnt]


def train_all(names: tuple[str, ...]) -> dict[str, list[float]]:
    """With each of these options."""
    return {name: train(OPTIONS[name]) for name in names}


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float]]:
    """What one process learns, uncompiled and compiled."""
    (learnt,) = launch(1, train_all, ("plain", "one graph", "sharded whole"))
    return dict(learnt)


@often("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_compiled_models_have_the_numbers_of_one_process(
    num_ranks: int, alone: dict[str, list[float]], capfd: pytest.CaptureFixture[str]
) -> None:
    """In DDP and sharded, also on ranks without samples; watch and guard have nothing to report."""
    names = tuple(name for name in OPTIONS if IS_SOAK or name != "buckets of 1 MiB")  # one bucket has it all
    for learnt in (alone, *launch(num_ranks, train_all, names)):
        for name, numbers in learnt.items():
            assert numbers == pytest.approx(alone["plain"][: len(numbers)], rel=1e-10), name
    assert re.findall(r"DDP\d{3}.*", capfd.readouterr().err) == []  # of a finding; torch warns of `unused`


def train_on(steps: list[tuple[Path, dict[str, Any], int]]) -> list[list[float]]:
    """Train until an epoch, or resume, with the checkpoints in each of the folders."""
    return [train(options, folder, num_epochs) for folder, options, num_epochs in steps]


def test_checkpoints_load_with_and_without_compile(tmp_path: Path, alone: dict[str, list[float]]) -> None:
    """One rank resumes uncompiled what two compiled; two resume compiled and sharded what one did not compile."""
    compiled, plain = tmp_path / "compiled", tmp_path / "plain"
    launch(2, train_on, [(compiled, {"compile": EAGER}, 1)])
    ((resumed, _),) = launch(1, train_on, [(compiled, {}, 2), (plain, {}, 1)])
    sharded = launch(2, train_on, [(plain, {"compile": EAGER, "shard": LAYERS}, 2)])
    for numbers in (resumed, *(one for (one,) in sharded)):
        assert numbers == pytest.approx(alone["plain"][:4], rel=1e-10)


def count_graphs(graph: Any, inputs: Any) -> Any:
    """A backend that counts what it compiles."""
    compiled.append(graph)
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


compiled: list[Any] = []


def train_split() -> list[tuple[dict[str, Any], int]]:
    """The weights after training with several buckets: uncompiled, compiled graph by graph, and by inductor."""
    torch.set_default_dtype(torch.float64)
    ways: list[dict[str, Any]] = [{}, {"compile": {"backend": count_graphs}}, {"compile": True}]
    found = []
    for options in ways:
        torch._dynamo.reset()
        loop = Loop(seed=4, accumulate=2, progress=False)
        torch.manual_seed(2)
        model: Any = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 256))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer = loop.prepare(model, optimizer, bucket_cap_mb=1, **options)
        loader = loop.loader(torch.utils.data.TensorDataset(torch.randn(16, 256)), global_batch_size=4)
        for (x,) in loop.batches(loader):
            with loop.accumulate(model):
                loop.backward(model(x).square().mean())
            loop.step(optimizer)
        found.append((ddpilot.unwrap(model).state_dict(), len(compiled)))
    return found


@soak
@pytest.mark.timeout(300)
def test_inductor_and_graphs_split_at_buckets_have_the_numbers_of_an_uncompiled_model() -> None:
    """A graph is split at each bucket of DDP; the default backend compiles C++ for the pieces."""
    for (plain, _), *others in launch(2, train_split):
        for weights, num_graphs in others:
            assert num_graphs > 1
            torch.testing.assert_close(weights, plain, rtol=1e-10, atol=1e-12)


def fit(compile: Any) -> list[float]:  # noqa: A002
    """The columns of the history of a fit."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = make_model("mlp")
    trainer = ddpilot.Trainer(
        model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), ema=0.9, compile=compile
    )
    data = make_data("mlp", 25)
    for _ in range(2):
        trainer.fit(data, data, epochs=1, global_batch_size=12, progress=False)
    return [row[name] for row in trainer.history.epochs for name in ("loss", "val_loss")]


def test_a_trainer_compiles_in_each_fit() -> None:
    """The second fit on the same ranks compiles nothing again, and the numbers are those of an uncompiled one."""
    (plain,) = launch(1, fit, False)
    for numbers in launch(2, fit, EAGER):
        assert numbers == pytest.approx(plain, rel=1e-10)
