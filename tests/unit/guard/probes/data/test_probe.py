# SPDX-License-Identifier: Apache-2.0
"""The data probe in one process: its notes, no effect on training, and errors in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils import fetch as torch_fetch

from ddpilot.guard.hook import install
from ddpilot.guard.probes.data import loaders, losses
from ddpilot.record.journal import Entry, read_journal

PROBES = ("ddpilot.guard.probes.data.probe:DataProbe", "ddpilot.guard.probes.saving:SavingProbe")
WATCHED: tuple[tuple[Any, str], ...] = (
    *((torch_loader._BaseDataLoaderIter, name) for name in ("__init__", "_reset", "_next_index", "__next__")),
    *((kind, "fetch") for kind in (torch_fetch._MapDatasetFetcher, torch_fetch._IterableDatasetFetcher)),
    *((DistributedDataParallel, name) for name in ("__init__", "forward")),
    *((dist, name) for name in ("all_reduce", "all_gather", "reduce", "gather")),
    *((torch, "save"), (torch.autograd, "backward")),
)
DATA = TensorDataset(torch.arange(24.0).reshape(12, 2))

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")


@contextmanager
def guarded(path: Path, said: list[str] | None = None) -> Iterator[None]:
    """The probes are installed while the block runs."""
    told: Callable[[str], None] = (said if said is not None else []).append
    stop = install(path, rank=0, probes=PROBES, report=told)
    try:
        yield
    finally:
        stop()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """A process group of this process alone, destroyed after the test."""

    def begin() -> None:
        dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


def read(path: Path, kind: str) -> list[Entry]:
    """Entries of that kind."""
    return [entry for entry in read_journal(path).entries if entry.kind == kind]


def step(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One of training."""
    loss: Any = model(x).square().sum()
    loss.backward()
    optimizer.step()


def test_nothing_is_left_where_the_probes_were(tmp_path: Path) -> None:
    """Each function of torch is the original again."""
    before = [getattr(owner, name) for owner, name in WATCHED]
    with guarded(tmp_path / "j"):
        assert all(getattr(owner, name) is not one for (owner, name), one in zip(WATCHED, before, strict=True))
    assert [getattr(owner, name) for owner, name in WATCHED] == before


def test_what_stands_for_a_loader_is_left_alone(tmp_path: Path) -> None:
    """As fastai's does: torch's iterator accepts any object with the attributes that it uses."""

    class StandIn:
        """What `_SingleProcessDataLoaderIter` needs, and no more."""

        _IterableDataset_len_called = generator = collate_fn = None
        _auto_collation = pin_memory = drop_last = persistent_workers = False
        _dataset_kind, _index_sampler = torch_loader._DatasetKind.Iterable, range(3)
        num_workers = timeout = 0
        pin_memory_device = ""
        dataset = ("a", "b", "c")

        def _get_shared_seed(self) -> None:
            """None is needed."""

    said: list[str] = []
    with guarded(tmp_path / "j", said):
        stand_in: Any = StandIn()
        stand_in.collate_fn = list
        assert len(list(torch_loader._SingleProcessDataLoaderIter(stand_in))) == 3
        assert [len(x) for (x,) in DataLoader(DATA, 5)] == [5, 5, 2]
    assert said == []
    assert len(read(tmp_path / "j", "loader_pass")) == 1


def test_passes_are_noted_with_their_batches(tmp_path: Path) -> None:
    """For a loader that is read twice, and one that is left early; with the user's line."""
    loader = DataLoader(DATA, 5)
    with guarded(tmp_path / "j"):
        for _ in range(2):
            assert [len(x) for (x,) in loader] == [5, 5, 2]
        next(iter(DataLoader(DATA, 5)))
    passes = [entry.values for entry in read(tmp_path / "j", "loader_pass")]
    assert [values["pass"] for values in passes] == [1, 2, 1]
    first, again, second = (values["loader"] for values in passes)
    assert first == again != second
    assert {values["length"] for values in passes} == {3}
    assert passes[0]["site"]["file"] == __file__
    ends = [entry.values for entry in read(tmp_path / "j", "pass_end")]
    assert [(values["samples"], values["evaluates"]) for values in ends] == [(12, False)] * 2
    batches = [entry.values for entry in read(tmp_path / "j", "batch")]
    prints = [[values["checksum"] for values in batches if values["pass"] == number] for number in (1, 2)]
    assert prints[0][:3] == prints[1]
    assert len(set(prints[1])) == 3


def test_an_evaluation_is_known_by_its_missing_gradients(tmp_path: Path) -> None:
    """Its batches are not compared."""
    with guarded(tmp_path / "j"), torch.no_grad():
        list(DataLoader(DATA, 5))
    assert [entry.values["evaluates"] for entry in read(tmp_path / "j", "pass_end")] == [True]
    assert read(tmp_path / "j", "batch") == []


def test_randomness_and_results_are_as_without(tmp_path: Path) -> None:
    """The same batches, the same states of every generator, the same weights."""

    def train() -> tuple[Any, ...]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        for (x,) in DataLoader(DATA, 5, shuffle=True):
            step(model, x, optimizer)
        weights = torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()
        return weights, torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]

    plain = train()
    with guarded(tmp_path / "j"):
        assert train() == plain
    assert train() == plain


def test_spoilt_weights_are_noted_once_and_a_skipped_step_is_not(tmp_path: Path) -> None:
    """The losses of the second and the fourth backward are NaN; the program skips the first of these steps."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guarded(tmp_path / "j"):
        for number in range(1, 7):
            loss: Any = model(torch.ones(1, 2)).sum() * (float("nan") if number in (2, 4) else 1.0)
            loss.backward()
            if number != 2:
                optimizer.step()
            optimizer.zero_grad()
    noted = [entry.values for entry in read(tmp_path / "j", "not_finite")]
    assert [(values["backward"], values["loss"]) for values in noted] == [(2, "nan"), (4, "nan")]
    (spoiled,) = read(tmp_path / "j", "spoiled")
    assert spoiled.values["backward"] == 4
    assert spoiled.values["parameters"] == ["one of shape (1, 2)", "one of shape (1,)"]


def train(model: nn.Linear, optimizer: torch.optim.Optimizer, factors: str) -> None:
    """A step per letter: the loss of "n" is NaN, that of "g" is not."""
    for letter in factors:
        loss: Any = model(torch.ones(1, 2)).sum() * (float("nan") if letter == "n" else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "second", ["another model", "another model, wrapped at once", "the same model, restored", "the same, not restored"]
)
def test_spoilt_weights_are_noted_again_in_another_training(
    tmp_path: Path, second: str, alone: Callable[[], None]
) -> None:
    """With its loss; not if the same weights were never finite again, nor while the first model lives."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finite = {name: one.clone() for name, one in model.state_dict().items()}
    with guarded(tmp_path / "j"):
        train(model, optimizer, "gnn")
        other, others = model, optimizer
        if second.startswith("another"):
            other = nn.Linear(2, 1)
            others = torch.optim.SGD(other.parameters(), lr=0.1)
        if second.endswith("wrapped at once"):
            alone()
            DistributedDataParallel(other)
        elif second != "the same, not restored":
            other.load_state_dict(finite)
            train(other, others, "g")
        train(other, others, "nn")
        train(model, optimizer, "n")
    noted, losses_noted = (
        [(entry.values["training"], entry.values["backward"]) for entry in read(tmp_path / "j", kind)]
        for kind in ("spoiled", "not_finite")
    )
    number = {"another model, wrapped at once": (1, 1), "the same, not restored": (0, 2)}.get(second, (0, 5))
    assert noted == list(dict.fromkeys([(0, 2), number]))
    assert set(losses_noted) >= set(noted)


def test_weights_that_others_have_spoilt_are_not_noted(tmp_path: Path) -> None:
    """Of two models whose losses contain each other, the first one."""
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with guarded(tmp_path / "j"):
        for number in range(4):
            for turn, optimizer in enumerate(optimizers):
                loss: Any = models[1](models[0](torch.ones(1, 2))).sum() * (float("nan") if number == 2 - turn else 1.0)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    (spoiled,) = read(tmp_path / "j", "spoiled")
    assert spoiled.values["backward"] == 4


@pytest.mark.parametrize(
    "broken", [(loaders, "fingerprint"), (losses.LossObserver, "_begins"), (loaders.LoaderObserver, "_made")]
)
def test_an_error_of_the_probe_is_said_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: tuple[Any, str]
) -> None:
    """It is off then, and noted in the journal."""

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(*broken, fail)
    said: list[str] = []
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with guarded(tmp_path / "j", said):
        for _ in range(2):
            for (x,) in DataLoader(DATA, 5):
                step(model, x, optimizer)
    assert said == ["guard no longer looks at data, randomness and losses: ZeroDivisionError: injected"]
    assert [entry.values["text"] for entry in read(tmp_path / "j", "fault")] == ["ZeroDivisionError: injected"]
    assert all(bool(one.isfinite().all()) for one in model.parameters())


def test_saves_are_noted_where_they_go_to_a_file(tmp_path: Path) -> None:
    """By path and by open file; not into memory."""
    import io

    with guarded(tmp_path / "j"):
        torch.save({"a": 1}, tmp_path / "one.pt")
        torch.save({"a": 1}, str(tmp_path / "two.pt"))
        with open(tmp_path / "three.pt", "wb") as file:
            torch.save({"a": 1}, f=file)
        torch.save({"a": 1}, io.BytesIO())
    paths = [Path(entry.values["path"]).name for entry in read(tmp_path / "j", "save")]
    assert paths == ["one.pt", "two.pt", "three.pt"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_a_gradient_whose_sum_overflows_is_finite(dtype: torch.dtype) -> None:
    """Only an element that is not finite counts."""
    largest = torch.full((3,), torch.finfo(dtype).max).to(dtype)
    assert losses._is_finite(largest)
    assert losses._is_finite(torch.zeros(0, dtype=dtype))
    for value in (float("inf"), float("-inf"), float("nan")):
        assert not losses._is_finite(torch.tensor([1.0, value, 2.0]).to(dtype))
    assert not losses._is_finite(torch.tensor([float("inf"), float("-inf")]).to(dtype))
