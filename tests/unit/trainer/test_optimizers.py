# SPDX-License-Identifier: Apache-2.0
"""Optimizers, schedulers and weight averages made from the arguments of `Trainer`."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from ddpilot.errors import LoopError
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.checks import check_callbacks
from ddpilot.trainer.optimizers import make_ema, make_optimizers, make_schedulers, relink
from ddpilot.trainer.run import trained_parts


def sgd(parameters: Any) -> SGD:
    """A function of parameters."""
    return SGD(parameters, lr=0.1)


def test_make_optimizers_takes_one_a_function_or_several() -> None:
    """An optimizer stays itself; a function gets all parameters, or those of the part that has its name."""
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 2)})
    own = sgd(model["b"].parameters())
    assert make_optimizers(own, model) == {"optimizer": own}
    assert len(make_optimizers(sgd, model)["optimizer"].param_groups[0]["params"]) == 4
    several = make_optimizers({"a": sgd, "rest": own}, model)
    assert several["a"].param_groups[0]["params"] == list(model["a"].parameters())
    assert several["rest"] is own


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda model: 0.1, r"`optimizer` is a float\. Give a torch optimizer, or a function"),
        (lambda model: sgd(nn.Linear(1, 1).parameters()), "2 of the parameters of `optimizer` do not belong to the mo"),
        (
            lambda model: {"a": lambda parameters: None},
            "the part 'a', .* give the function without",
        ),
        (lambda model: {"a": None}, "`a` is a NoneType"),
    ],
)
def test_make_optimizers_refuses_what_would_train_nothing(given: Any, message: str) -> None:
    """Such as the optimizer of a model that a cell has re-created."""
    model = nn.Linear(1, 1)
    with pytest.raises(LoopError, match=message):
        make_optimizers(given(model), model)


class Gan(nn.ModuleDict):
    """A container of parts, of a class of its own."""


class Own(nn.Module):
    """A model with parts of these names."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(4, 4)
        self.discriminator = nn.Sequential(nn.Linear(4, 1))
        self.noise = nn.Dropout()


PARTS = dict(Own().named_children())


@pytest.mark.parametrize("model", [Own(), Gan(PARTS), nn.ModuleDict(PARTS)])
def test_make_optimizers_gives_each_function_its_part_of_any_model(model: nn.Module) -> None:
    """Parts are submodules by path; unknown parts, parts without parameters and shared parameters are rejected."""
    made = make_optimizers({"generator": sgd, "discriminator.0": sgd}, model)
    sizes = {name: sum(p.numel() for p in one.param_groups[0]["params"]) for name, one in made.items()}
    assert sizes == {"generator": 20, "discriminator.0": 5}
    with pytest.raises(LoopError, match=r"an optimizer for the part 'discriminatr', .* Did you mean 'discriminator'\?"):
        make_optimizers({"generator": sgd, "discriminatr": sgd}, model)
    with pytest.raises(LoopError, match=r"the part 'noise' has no parameters to train\. Leave its optimizer out"):
        make_optimizers({"noise": sgd}, model)
    with pytest.raises(LoopError, match=r"'generator' and 'all' both have the parameter 'generator\.weight'"):
        make_optimizers({"generator": sgd, "all": sgd(model.parameters())}, model)
    with pytest.raises(LoopError, match=r"`optimizer` is an empty mapping"):
        make_optimizers({}, model)


def test_trained_parts_are_those_of_a_container_without_a_forward_pass() -> None:
    """Each goes into a DDP of its own; a model with a forward pass goes into one."""

    class Called(nn.ModuleDict):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    parts = {"a": nn.Linear(1, 1)}
    assert trained_parts(nn.ModuleDict(parts)) == trained_parts(Gan(parts)) == parts
    assert trained_parts(Called(parts)) is trained_parts(Own()) is None


def test_make_schedulers_finds_the_optimizer_that_it_belongs_to() -> None:
    """A scheduler, a function or a mapping; LoopError for a different optimizer's, and for an unknown name."""
    model = nn.Linear(1, 1)
    optimizers = {"first": sgd(model.parameters()), "second": sgd(model.parameters())}
    second = StepLR(optimizers["second"], 1)
    assert make_schedulers(None, optimizers) == {}
    assert make_schedulers(second, optimizers) == {"second": second}
    assert make_schedulers(lambda one: StepLR(one, 1), optimizers)["first"].optimizer is optimizers["first"]
    both = make_schedulers({"first": lambda one: StepLR(one, 1), "second": second}, optimizers)
    assert both["first"].optimizer is optimizers["first"]
    with pytest.raises(LoopError, match="the StepLR belongs to a different optimizer"):
        make_schedulers(second, {"first": optimizers["first"]})
    with pytest.raises(LoopError, match=r"a scheduler of `third`\. Name one of the optimizers\. There is 'first'"):
        make_schedulers({"third": lambda one: StepLR(one, 1)}, optimizers)


def test_relink_lets_schedulers_step_after_a_journey_without_a_warning() -> None:
    """Torch warns that the optimizer was not stepped if the wrapper of its `step` was lost."""
    model = nn.Linear(1, 1)
    optimizer = sgd(model.parameters())
    parts = [ConstantLR(optimizer, 0.5, 2), LambdaLR(optimizer, lambda epoch: 0.1 * epoch)]
    scheduler = SequentialLR(optimizer, parts, [1])
    optimizer, scheduler = pickle.loads(cloudpickle.dumps((optimizer, scheduler)))
    relink(scheduler, optimizer)
    relink(scheduler, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.param_groups[0]["params"][0].grad = torch.ones(1, 1)
        before = optimizer.param_groups[0]["params"][0].item()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["params"][0].item() == pytest.approx(before - 0.05)
    assert scheduler.get_last_lr() == [0.0]


def test_make_ema_averages_as_torch_does_and_reads_its_counter_once() -> None:
    """Bit for bit, with buffers, also after a state was loaded; torch's reads the counter twice in each update."""

    class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
        num = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.num += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    made = make_ema(0.9, model)
    assert made is not None
    torchs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    before = {name: value.clone() for name, value in torchs.state_dict().items()}
    for number in range(6):
        if number == 4:
            made.load_state_dict(before)
            torchs.load_state_dict(before)
        with torch.no_grad():
            model(torch.randn(4, 2))
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight))
        torchs.update_parameters(model)
        made = copy.deepcopy(made) if number == 2 else made
        with Reads() as reads:  # type: ignore[no-untyped-call]
            made.update_parameters(model)
        assert reads.num == (1 if number in (0, 2, 4) else 0)
        for name, value in torchs.state_dict().items():
            assert torch.equal(made.state_dict()[name], value), (number, name)


def test_make_ema_takes_a_decay_or_an_average() -> None:
    """None stays None; an invalid decay is rejected."""
    model = nn.Linear(1, 1)
    given = AveragedModel(model)
    assert make_ema(None, model) is None
    assert make_ema(given, model) is given
    made = make_ema(0.9, model)
    assert made is not None
    made.update_parameters(model)
    before = model.weight.item()
    with torch.no_grad():
        model.weight += 1.0
    made.update_parameters(model)
    assert made.module.get_parameter("weight").item() == pytest.approx(before + 0.1)
    with pytest.raises(LoopError, match=r"`ema=1\.5`\. Give a decay such as 0\.999"):
        make_ema(1.5, model)


class Nowhere(Callback):
    """Says nonsense."""

    ranks = "some"  # type: ignore[assignment]


def test_check_callbacks_rejects_other_objects() -> None:
    """Before a rank is started."""
    check_callbacks([Callback()])
    with pytest.raises(LoopError, match="a function among `callbacks`"):
        check_callbacks([sgd])
    with pytest.raises(LoopError, match=r"Nowhere\.ranks is 'some'\. Use 'zero' or 'all'"):
        check_callbacks([Nowhere()])
