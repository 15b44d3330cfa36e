# SPDX-License-Identifier: Apache-2.0
"""What the probe records of one process, and that the program can do with its objects what it can without."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpilot.guard.hook import install
from ddpilot.profiler.rank.probe import PhaseProbe
from ddpilot.profiler.spans_file import PHASES, read_times


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed environment variable, which torch's optimizers would set."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """Record updates into `folder`."""
    make_probe = functools.partial(PhaseProbe, folder, 0)
    functools.update_wrapper(make_probe, PhaseProbe, updated=())
    reported: list[str] = []
    stop = install(folder / "journal", rank=0, probes=(make_probe,), report=reported.append)
    try:
        yield
    finally:
        stop()
    assert not reported


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num: int) -> None:
    """`num` updates, of which those whose step raises an exception are passed over."""
    for _ in range(num):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        try:
            optimizer.step()
        except ArithmeticError:
            continue


class FailsOnce(torch.optim.SGD):
    """An optimizer whose second step raises an exception."""

    num_steps = 0

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Raise it, or step."""
        self.num_steps += 1
        if self.num_steps == 2:
            raise ArithmeticError
        return super().step(closure)


def test_a_step_that_raised_an_exception_ends_no_recording(tmp_path: Path) -> None:
    """The steps after it are recorded as updates, each once: its base class calls the hooks of steps, too."""
    model = torch.nn.Linear(3, 1)
    torch.optim.SGD(model.parameters(), lr=0.1)  # the first one of a class makes its `step` call hooks
    with recording(tmp_path):
        train(model, FailsOnce(model.parameters(), lr=0.1), 6)
    times = read_times(tmp_path, 0)
    assert len(times.updates) == 5
    assert (times.spans["phase"] == PHASES.index("optimizer")).sum() == 5


def test_a_model_is_copied_and_pickled_as_without(tmp_path: Path) -> None:
    """What is pickled needs no ddpilot."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 1))
    with recording(tmp_path):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
        copied = copy.deepcopy(model)
        pickled = pickle.dumps(model)
        loaded = pickle.loads(pickled)
        for each in (copied, loaded):
            assert torch.equal(each(torch.ones(1, 3)), model(torch.ones(1, 3)))
    assert b"ddpilot" not in pickled
    assert not model._forward_hooks
    torch.save(loaded, tmp_path / "model.pt")
    code = "import sys, torch; m = torch.load(sys.argv[1], weights_only=False); m(torch.ones(1, 3))"
    code += "; assert not any(name.startswith('ddpilot') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], check=True, timeout=60)


def test_the_time_of_a_closure_is_not_the_optimizers(tmp_path: Path) -> None:
    """LBFGS calls its closure several times within a step; each is a span of its own, and the result is the same."""
    losses = []
    for records in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def closure(model: torch.nn.Linear = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(torch.ones(2, 3)) - 1).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        with recording(tmp_path) if records else contextlib.nullcontext():
            for _ in range(3):
                loss = optimizer.step(closure)  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
    times = read_times(tmp_path, 0)
    assert losses[0] == losses[1]
    assert len(times.updates) == 3
    assert (times.spans["phase"] == len(PHASES)).sum() >= 3
    assert (times.spans["phase"] == PHASES.index("backward")).sum() >= 3


def test_elements_are_counted_in_the_update_that_is_made_with_them(tmp_path: Path) -> None:
    """A batch is loaded before the forward pass, when the update before has made its step."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.ones(length, 1) for length in (1, 2, 3, 4)]
    with recording(tmp_path):
        for batch in torch.utils.data.DataLoader(data, batch_size=None):  # type: ignore[arg-type]
            model(batch).sum().backward()
            optimizer.step()
    assert list(read_times(tmp_path, 0).counts["num_elements"]) == [1, 2, 3, 4]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_of_a_list_of_images_are_counted(tmp_path: Path, num_workers: int) -> None:
    """Not the three channels of an image; a loop that is left early and workers that stay change nothing."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images = torch.utils.data.TensorDataset(torch.ones(10, 3, 4))
    loader = torch.utils.data.DataLoader(
        images, batch_size=4, collate_fn=list, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    with recording(tmp_path):
        for most in (1, 3):
            for place, batch in enumerate(loader):
                model(torch.stack([image for (image,) in batch])).sum().backward()
                optimizer.step()
                if place + 1 == most:
                    break
    assert read_times(tmp_path, 0).updates["num_samples"].tolist() == [4, 4, 4, 2]


def test_samples_that_are_only_evaluated_are_not_counted(tmp_path: Path) -> None:
    """A validation loader that is read with gradients on; but those that a teacher sees before the model are."""
    model, teacher = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(12, 3))
    with recording(tmp_path):
        for (x,) in torch.utils.data.DataLoader(data, batch_size=2):
            with torch.no_grad():
                wanted = teacher(x)
            (model(x) - wanted).square().sum().backward()
            optimizer.step()
            for (y,) in torch.utils.data.DataLoader(data, batch_size=6):
                with torch.no_grad():
                    model(y)
    times = read_times(tmp_path, 0)
    assert times.updates["num_samples"].tolist() == [2] * 6
    assert times.counts["num_elements"].tolist() == [6] * 6


def test_steps_of_fastai_are_updates_and_it_is_left_as_it_was(tmp_path: Path) -> None:
    """Its optimizers are not torch's, and call none of torch's hooks."""
    optimizer_module = pytest.importorskip("fastai.optimizer")
    step = optimizer_module.Optimizer.step
    model = torch.nn.Linear(3, 1)
    with recording(tmp_path):
        train(model, optimizer_module.SGD(list(model.parameters()), lr=0.1), 4)
    times = read_times(tmp_path, 0)
    assert len(times.updates) == 4
    assert (times.spans["phase"] == PHASES.index("optimizer")).sum() == 4
    assert len(times.memory) >= 1
    assert optimizer_module.Optimizer.step is step
