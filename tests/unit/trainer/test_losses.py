# SPDX-License-Identifier: Apache-2.0
"""Default forward passes, losses with counts, and loaders for each kind of data."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ddpilot.errors import LoopError
from ddpilot.group.protocol import FakeGroup
from ddpilot.trainer.fit.preparation import make_loader_of
from ddpilot.trainer.losses import check_weighted, with_count
from ddpilot.trainer.ranks import is_on_ranks
from ddpilot.trainer.run import call_model
from ddpilot.trainer.trainer import Trainer
from ddpilot.training.evaluation.evaluate import forward_batch, predict_batch
from ddpilot.training.loop import Loop


class Add(nn.Module):
    """Adds its arguments."""

    def forward(self, x: Any, y: Any = 0) -> Any:
        """Numbers or tensors."""
        return x + y

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        """Another method."""
        assert not torch.is_grad_enabled()
        assert not self.training
        return 2 * x


@pytest.mark.parametrize(
    ("batch", "expected"),
    [((1, 5), (1, 5)), ([1, 2, 5], (3, 5)), ({"x": 1, "y": 2}, (3, {"x": 1, "y": 2}))],
)
def test_forward_batch_gives_output_and_target(batch: Any, expected: Any) -> None:
    """The last item is the target; a mapping goes by name and is its own."""
    assert forward_batch(Add(), batch) == expected
    assert predict_batch(Add(), batch) == expected[0]


@pytest.mark.parametrize(("batch", "said"), [((1,), "a tuple of one item"), (torch.ones(2), "a Tensor")])
def test_forward_batch_refuses_a_batch_without_a_target(batch: Any, said: str) -> None:
    """The error names the argument to pass; predicting needs no target."""
    with pytest.raises(LoopError, match=rf"it is {said}: there is no target\. Pass `forward=lambda"):
        forward_batch(Add(), batch)
    assert torch.as_tensor(predict_batch(Add(), batch)).eq(1).all()


def test_with_count_reads_a_loss() -> None:
    """A mean alone, or with its count."""
    assert with_count(0.5) == (0.5, None)
    assert with_count((0.5, torch.tensor(7))) == (0.5, 7.0)


def test_call_model_leaves_modes_as_they_were() -> None:
    """In eval mode and without gradients, on the CPU; any method."""
    model = Add()
    x = torch.ones(2, requires_grad=True)
    assert call_model(model, "twice", x, device=torch.device("cpu")).tolist() == [2.0, 2.0]
    assert call_model(model, "forward", x, y=x, device=torch.device("cpu")).tolist() == [2.0, 2.0]
    assert model.training
    with pytest.raises(LoopError, match="calling `thrice` of the model: Add has no such method"):
        call_model(model, "thrice", x, device=torch.device("cpu"))


class Stream(IterableDataset[torch.Tensor]):
    """Five numbers."""

    def __iter__(self) -> Any:
        return iter(torch.arange(5.0))


def test_make_loader_of_takes_datasets_loaders_and_streams() -> None:
    """Each gives this rank's part; a DataLoader has a batch size already."""
    data = TensorDataset(torch.arange(6.0))

    def first(given: Any, size: int | None = 4) -> list[float]:
        options = {"global_batch_size": size, "shuffle": False}
        loader = make_loader_of(given, Loop(group=FakeGroup(rank=1, world_size=2)), options)
        batch = next(iter(loader.iterate(0)))
        return torch.as_tensor(batch.data if isinstance(given, Stream) else batch.data[0]).tolist()

    assert first(data) == [2.0, 3.0]
    assert first(Stream()) == [2.0, 3.0]
    assert first(DataLoader(data, batch_size=4), None) == first(DataLoader(data, batch_size=4)) == [2.0, 3.0]
    made = make_loader_of(data, loop := Loop(group=FakeGroup()), {"global_batch_size": 4})
    assert make_loader_of(made, loop, {}) is made
    with pytest.raises(LoopError, match="`global_batch_size=4`, and the loader has `batch_size=3`"):
        first(DataLoader(data, batch_size=3))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}, False),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, None),
    ],
)
def test_is_on_ranks_detects_a_launcher(
    variables: dict[str, str], expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook in a Slurm job of one task starts ranks; a job of one rank under torchrun does not."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_on_ranks() is (True if expected is None else expected)


def test_check_weighted_refuses_the_loss_of_a_transformers_model_without_a_count() -> None:
    """Only the model's own loss, and only if labels are ignored; the error states their number."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    loss, full = torch.tensor(2.0), torch.ones(2, 3, dtype=torch.int64)
    output, batch = outputs.MaskedLMOutput(loss=loss), {"labels": full.masked_fill(torch.eye(2, 3).bool(), -100)}
    for given in (loss, {"lm": loss, "penalty": torch.tensor(1.0)}):
        with pytest.raises(LoopError, match=r"a mean over the 4 of 6 labels that are not -100; .* a mean over 2 sampl"):
            check_weighted(given, output, batch, 0)
    check_weighted({"lm": (loss, 4)}, output, batch, 0)
    check_weighted(loss, output, {"labels": full}, 0)
    check_weighted(loss * 1, output, batch, 0)
    check_weighted(loss, {"loss": loss}, batch, 0)
    check_weighted(loss, output, (full, full), 0)


def test_fit_refuses_the_loss_of_a_transformers_model_without_a_count() -> None:
    """Also on one rank, where the loss would be correct, as it would not be on two."""
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = self.layer(x)
            return outputs.TokenClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)

    data: Any = [{"x": torch.ones(1), "labels": torch.tensor(label)} for label in (1, -100, 2, 0)]
    given: dict[str, Any] = {"global_batch_size": 4, "nproc_per_node": 0, "progress": False}
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(LoopError, match=r"which is a mean over the 3 of 4 labels .* Return \(output\.loss, \(batch"):
        Trainer(Model(), lambda output, batch: output.loss, sgd).fit(data, **given)
    counted = Trainer(Model(), lambda output, batch: (output.loss, (batch["labels"] != -100).sum()), sgd)
    assert counted.fit(data, **given).epochs[0]["loss"] > 0
