# SPDX-License-Identifier: Apache-2.0
"""Build optimizers, schedulers and weight averages from the arguments of `Trainer`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ddpilot.errors import LoopError
from ddpilot.trainer.checks import MAKING, suggest
from ddpilot.training.models.registry import parameters_of
from ddpilot.training.step.weight_averages import Averaging, WeightAverage

_ONLY = "optimizer"


def make_optimizers(given: Any, model: nn.Module) -> dict[str, Optimizer]:
    """Return optimizers by name, from an optimizer, a function of parameters that returns one, or a mapping of these.

    In a mapping, a function is called with the parameters of the submodule of its name. Raises LoopError for anything
    else, for an unknown submodule, for one without parameters, for an optimizer with parameters that are not the
    model's, and for parameters in two optimizers.
    """
    if isinstance(given, Mapping) and not given:
        raise LoopError(MAKING, found="`optimizer` is an empty mapping", fix="Name at least one optimizer.")
    parts = {name: _part(model, name, one) for name, one in given.items()} if isinstance(given, Mapping) else {}
    if not isinstance(given, Mapping):
        given, parts = {_ONLY: given}, {_ONLY: model}
    made: dict[str, Optimizer] = {}
    for name, one in given.items():
        made[name] = one if isinstance(one, Optimizer) or not callable(one) else one(parts[name].parameters())
        _check_optimizer(name, made[name], model)
    _check_apart(made, model)
    return made


def _part(model: nn.Module, name: str, one: object) -> nn.Module:
    """Return the submodule whose parameters the function `one` takes; the model if `one` is an optimizer."""
    if isinstance(one, Optimizer) or not callable(one):
        return model
    try:
        part = model.get_submodule(name) if name else None
    except AttributeError:
        part = None
    if part is None:
        known = [path for path, module in model.named_modules() if path and next(module.parameters(), None) is not None]
        guess = f"{suggest(name, known)} " if known else ""
        raise LoopError(
            MAKING,
            found=f"an optimizer for the part {name!r}, which the model does not have",
            fix=f"{guess}For the whole model, give the function without a mapping.",
        )
    if next(part.parameters(), None) is None:
        raise LoopError(MAKING, found=f"the part {name!r} has no parameters to train", fix="Leave its optimizer out.")
    return part


def _check_apart(optimizers: Mapping[str, Optimizer], model: nn.Module) -> None:
    """Raise LoopError for a parameter in two optimizers: each would update it, with its own moments."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        for number in map(id, parameters_of(optimizer)):
            other = owners.setdefault(number, name)
            if other != name:
                found = f"the optimizers {other!r} and {name!r} both have the parameter {names[number]!r}"
                fix = "Give each parameter to one optimizer; otherwise every update changes it twice."
                raise LoopError(MAKING, found=found, fix=fix)


def _check_optimizer(name: str, optimizer: object, model: nn.Module) -> None:
    if not isinstance(optimizer, Optimizer):
        raise LoopError(
            MAKING,
            found=f"`{name}` is a {type(optimizer).__name__}",
            fix="Give a torch optimizer, or a function that makes one: `lambda params: torch.optim.AdamW(params)`.",
        )
    own = {id(parameter) for parameter in model.parameters()}
    num_foreign = sum(id(each) not in own for each in parameters_of(optimizer))
    if num_foreign:
        raise LoopError(
            MAKING,
            found=f"{num_foreign} of the parameters of `{name}` do not belong to the model",
            fix="Create the optimizer from this model's parameters; in a notebook, run both cells again.",
        )


_NOT_CARRIED = ("step", "profile_hook_step")


def own_attributes(optimizers: Mapping[str, Optimizer]) -> dict[str, dict[str, Any]]:
    """Return the attributes that a copy of each optimizer would lack: torch pickles and copies only three of them.

    Pickle or copy them together with the optimizers, as they may share lists: LBFGS has its parameters in one of them,
    and SAM the optimizer that it wraps.
    """
    return {
        name: {
            key: value
            for key, value in vars(one).items()
            if key not in ("defaults", "state", "param_groups", *_NOT_CARRIED) and not key.startswith("_optimizer_")
        }
        for name, one in optimizers.items()
    }


def restore_attributes(optimizers: Mapping[str, Optimizer], attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Set `own_attributes` of the originals on copies of the optimizers."""
    for name, values in attributes.items():
        for key, value in values.items():
            vars(optimizers[name]).setdefault(key, value)


def make_schedulers(given: Any, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Return schedulers by their optimizer's name, from a scheduler, a function of an optimizer or a mapping."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {
            name: one if hasattr(one, "step") else one(_optimizer_of(name, optimizers)) for name, one in given.items()
        }
    if not hasattr(given, "step"):
        name = next(iter(optimizers))
        return {name: given(optimizers[name])}
    names = [name for name, optimizer in optimizers.items() if getattr(given, "optimizer", None) is optimizer]
    if not names:
        raise LoopError(
            MAKING,
            found=f"the {type(given).__name__} belongs to a different optimizer",
            fix="Create it from this one, or give a function: `lambda optimizer: OneCycleLR(optimizer, ...)`.",
        )
    return {names[0]: given}


def _optimizer_of(name: str, optimizers: Mapping[str, Optimizer]) -> Optimizer:
    if name not in optimizers:
        fix = f"Name one of the optimizers. {suggest(name, optimizers)}"
        raise LoopError(MAKING, found=f"a scheduler of `{name}`", fix=fix)
    return optimizers[name]


def make_ema(
    ema: float | AveragedModel | None, model: nn.Module, average: Averaging | None = None
) -> AveragedModel | None:
    """Return the average of the weights that `ema`, a decay, or `average` describe; an AveragedModel is unchanged."""
    if ema is not None and average is not None:
        found = "`ema` and `average`, and evaluations use one average"
        raise LoopError(MAKING, found=found, fix="Write average=Averaging(decay=0.999, ...) in place of `ema`.")
    given: object = average
    if given is not None and not isinstance(given, Averaging):
        fix = "Give Averaging(...), such as Averaging(start='75 epochs', every='1 epoch')."
        raise LoopError(MAKING, found=f"`average` is {given!r}", fix=fix)
    if average is not None:
        return WeightAverage(model, average)
    if ema is None or isinstance(ema, AveragedModel):
        return ema
    if not 0 < ema < 1:
        raise LoopError(MAKING, found=f"`ema={ema}`", fix="Give a decay such as 0.999, or an AveragedModel.")
    return WeightAverage(model, Averaging(decay=float(ema)))


def relink(scheduler: Any, optimizer: Optimizer) -> None:
    """Attach `scheduler` to `optimizer` after both were unpickled, which loses the wrapper of `optimizer.step`."""
    scheduler.optimizer = optimizer
    for inner in getattr(scheduler, "_schedulers", ()):  # in SequentialLR and ChainedScheduler
        relink(inner, optimizer)
    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer.step = _marked(optimizer)  # type: ignore[method-assign]


def _marked(optimizer: Optimizer) -> Callable[..., Any]:
    step = optimizer.step

    @functools.wraps(step)
    def marked(*args: Any, **kwargs: Any) -> Any:
        vars(optimizer)["_opt_called"] = True
        return step(*args, **kwargs)

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return marked
