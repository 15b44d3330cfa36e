# SPDX-License-Identifier: Apache-2.0
"""Validate arguments before a rank starts, with suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import DataLoader

from ddpilot.data.options import LoaderOptions
from ddpilot.errors import LoopError, did_you_mean
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.run import trained_parts

MAKING = "making a Trainer"
"""What a constructor's errors state as the failed action."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean 'x'?" with the most similar known name, or a list of all of them if none is similar."""
    known = list(dict.fromkeys(known))
    return did_you_mean(name, known, show=repr, cutoff=0.55) or f"There is {', '.join(map(repr, known))}."


def check_names(did: str, what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise LoopError for the first of `given` that is not in `known`, with a similar name."""
    for name in given:
        if name not in known:
            raise LoopError(did, found=f"{what} has no {name!r}", fix=suggest(name, known))


def check_choice(did: str, what: str, given: object, known: Collection[str]) -> None:
    """Raise LoopError unless `given` is one of `known`."""
    if given not in known:
        raise LoopError(did, found=f"`{what}` is {given!r}", fix=f"Use {' or '.join(map(repr, known))}.")


def check_forward(did: str, model: nn.Module, has_own_forward: bool) -> None:
    """Raise LoopError for a ModuleDict without `forward=`, as its parts do not define a forward pass."""
    parts = trained_parts(model)
    if parts is not None and not has_own_forward:
        found = f"the model is a ModuleDict of {', '.join(map(repr, parts))}, which has no `forward` of its own"
        fix = "Pass `forward=lambda model, batch: (output, target)`, which calls the parts, or override `train_batch`."
        raise LoopError(did, found=found, fix=fix)


def check_model(model: object) -> None:
    """Raise LoopError if `model` is not a module, or if it has uninitialized parameters."""
    if not isinstance(model, nn.Module):
        raise LoopError(MAKING, found=f"`model` is a {type(model).__name__}", fix="Give a torch.nn.Module.")
    lazy = [name for name, parameter in model.named_parameters() if isinstance(parameter, UninitializedParameter)]
    if lazy:
        found = f"parameters without a shape yet: {', '.join(lazy[:4])}"
        raise LoopError(MAKING, found=found, fix="Call the model with one batch first, which initializes them.")


def check_metrics(metrics: object) -> None:
    """Raise LoopError if `metrics` is not a mapping of metrics by name."""
    if metrics is not None and not callable(getattr(metrics, "items", None)):
        raise LoopError(MAKING, found=f"`metrics` is {metrics!r}", fix='Give a dict: {"accuracy": accuracy}.')


def check_callbacks(given: Sequence[object]) -> None:
    """Raise LoopError for an object that is not a Callback, an invalid `ranks`, or an unknown `on_...` method."""
    for one in given:
        if not isinstance(one, Callback):
            found = f"a {type(one).__name__} among `callbacks`"
            raise LoopError(MAKING, found=found, fix="Derive its class from ddpilot.Callback.")
        if str(one.ranks) not in ("zero", "all"):
            found = f"{type(one).__name__}.ranks is {one.ranks!r}"
            raise LoopError(MAKING, found=found, fix="Use 'zero' or 'all'.")
        for name in dir(type(one)):
            if name.startswith("on_") and not hasattr(Callback, name) and callable(getattr(one, name)):
                known = [each for each in vars(Callback) if each.startswith("on_")]
                fix = did_you_mean(name, known) or f"The methods are {', '.join(known)}."
                found = f"{type(one).__name__}.{name}, which is never called"
                raise LoopError(MAKING, found=found, fix=fix)


def check_loader_options(did: str, what: str, options: Iterable[str]) -> None:
    """Raise LoopError for names that are not options of any loader."""
    known = [field.name for field in fields(LoaderOptions) if field.name != "seed"]  # that of the trainer
    check_names(did, what, options, known)


def check_whole(did: str, what: str, data: object) -> None:
    """Raise LoopError for a DataLoader that drops samples when all of them must be counted."""
    if not isinstance(data, DataLoader) or not data.drop_last or not data.batch_size:
        return
    size = len(data.dataset) if hasattr(data.dataset, "__len__") else None
    if size is None or size % data.batch_size:
        kept = "" if size is None else f": {size - size % data.batch_size} of {size} samples would count"
        found = f"{what} is a DataLoader with drop_last=True{kept}"
        raise LoopError(did, found=found, fix="Make it with drop_last=False, or give the dataset itself.")


def is_count(number: object) -> bool:
    """True for an int that is not a bool."""
    return isinstance(number, int) and not isinstance(number, bool)
