# SPDX-License-Identifier: Apache-2.0
"""Validate the arguments of `Trainer` and its methods before a rank starts, with suggestions for misspelt names."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddpilot.data.loaders import make_loader, make_stream_loader, shard_loader
from ddpilot.errors import LoopError, did_you_mean
from ddpilot.trainer.history import BOOKKEEPING
from ddpilot.trainer.run import trained_parts
from ddpilot.training.loop import Loop
from ddpilot.training.options import CheckpointOptions

if TYPE_CHECKING:
    from ddpilot.trainer.core import TrainerCore
    from ddpilot.trainer.fit import FitOptions
    from ddpilot.trainer.trainer import Trainer

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

_MAKING = "making a Trainer"
_FITTING = "starting a fit"
_OWN = ("self", "dataset", "loader", "rank", "world_size", "seed", "say", "options")
"""Arguments that the user cannot pass: they are set by the trainer, the group or the data."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean 'x'?" with the most similar known name, or a list of all of them if none is similar."""
    known = list(dict.fromkeys(known))
    return did_you_mean(name, known, show=repr, cutoff=0.55) or f"There is {', '.join(map(repr, known))}."


def naming_arguments(
    did: str, elsewhere: Mapping[str, str] | None = None
) -> Callable[[Callable[_Given, _Result]], Callable[_Given, _Result]]:
    """Decorate a method to raise LoopError for unknown arguments, naming a similar one, and for missing ones.

    `did`: what the method does, for the message. `elsewhere`: for arguments that belong to a different method, the text
    that says which.
    """

    def decorate(method: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        signature = inspect.signature(method)
        own = [one for one in signature.parameters.values() if one.name != "self"]
        takes_any = any(one.kind is one.VAR_KEYWORD for one in own)

        @functools.wraps(method)
        def checked(*args: _Given.args, **options: _Given.kwargs) -> _Result:
            known = [one.name for one in own if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
            for name, value in options.items():
                if name not in known and not takes_any:
                    fix = (elsewhere or {}).get(name) or suggest(name, known)
                    raise LoopError(did, found=f"an argument `{name}={value!r}`", fix=fix)
            given = {*known[: len(args) - 1], *options}
            if missing := [one.name for one in own if one.default is one.empty and one.name in {*known} - given]:
                needed = [one.name for one in own if one.default is one.empty and one.name in known]
                found = (
                    f"{' and '.join(f'`{name}`' for name in missing)} {'is' if len(missing) == 1 else 'are'} missing"
                )
                raise LoopError(did, found=found, fix=f"Give ({', '.join(needed)}, ...).")
            return method(*args, **options)

        return checked

    return decorate


def check_names(did: str, what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise LoopError for the first of `given` that is not in `known`, with a similar name."""
    for name in given:
        if name not in known:
            raise LoopError(did, found=f"{what} has no {name!r}", fix=suggest(name, known))


def check_choice(did: str, what: str, given: object, known: Collection[str]) -> None:
    """Raise LoopError unless `given` is one of `known`."""
    if given not in known:
        raise LoopError(did, found=f"`{what}` is {given!r}", fix=f"Say {' or '.join(map(repr, known))}.")


def check_forward(did: str, model: nn.Module, has_own_forward: bool) -> None:
    """Raise LoopError for a ModuleDict without `forward=`, as its parts do not define a forward pass."""
    parts = trained_parts(model)
    if parts is not None and not has_own_forward:
        found = f"the model is a ModuleDict of {', '.join(map(repr, parts))}, which has no forward pass of its own"
        fix = (
            "Pass `forward=lambda model, batch: (output, target)`, which calls the parts; for a step of another kind, "
        )
        raise LoopError(did, found=found, fix=fix + "override `train_batch`.")


def check_model(model: object) -> None:
    """Raise LoopError if `model` is not a module, or if it has uninitialized parameters."""
    if not isinstance(model, nn.Module):
        raise LoopError(_MAKING, found=f"`model` is a {type(model).__name__}", fix="Give a torch.nn.Module.")
    lazy = [name for name, parameter in model.named_parameters() if isinstance(parameter, UninitializedParameter)]
    if lazy:
        found = f"parameters without a shape yet: {', '.join(lazy[:4])}"
        raise LoopError(_MAKING, found=found, fix="Call the model with one batch first, which gives them theirs.")


def check_metrics(metrics: object) -> None:
    """Raise LoopError if `metrics` is not a mapping of metrics by name."""
    if metrics is not None and not callable(getattr(metrics, "items", None)):
        raise LoopError(_MAKING, found=f"`metrics` is {metrics!r}", fix='Give a dict: {"accuracy": accuracy}.')


def check_trainer(trainer: TrainerCore) -> None:
    """Raise LoopError for invalid arguments, and for those that would train or measure something else than intended."""
    loss_fn: object = trainer.loss_fn
    if loss_fn is not None and not callable(loss_fn):
        found = f"`loss_fn` is {loss_fn!r}"
        raise LoopError(_MAKING, found=found, fix="Give a function of (output, target): torch.nn.functional.mse_loss.")
    if trainer.loss_fn is not None and "loss" in trainer.metrics:
        found = "a metric called 'loss', which is the name of `loss_fn` in the history and in evaluations"
        raise LoopError(_MAKING, found=found, fix="Call the metric by another name.")
    check_choice(_MAKING, "precision", trainer.precision, ("fp32", "bf16", "fp16"))
    check_choice(_MAKING, "scheduler_per", trainer.scheduler_per, ("update", "epoch"))
    if trainer.clip_norm is not None and not trainer.clip_norm > 0:
        found = f"`clip_norm` is {trainer.clip_norm}"
        raise LoopError(_MAKING, found=found, fix="Give a limit above 0; None does not clip.")
    if not _is_count(trainer.accumulate) or trainer.accumulate < 1:
        found = f"`accumulate` is {trainer.accumulate!r}"
        raise LoopError(_MAKING, found=found, fix="Give a number of batches, 1 or more.")


def check_fit(trainer: Trainer, fit: FitOptions, *, has_own_step: bool) -> None:
    """Raise LoopError for what would fail on every rank, before a rank is started."""
    for name in ("epochs", "until_epoch"):
        number = getattr(fit, name)
        if not (number is None and name == "until_epoch") and (not _is_count(number) or number < 0):
            found = f"`{name}` is {number!r}"
            raise LoopError(_FITTING, found=found, fix="Give a whole number of epochs, 0 or more.")
    if fit.train_set is None:
        raise LoopError(_FITTING, found="`train_set` is None", fix="Give a dataset or a DataLoader.")
    for name, data in (("train_set", fit.train_set), ("val_set", fit.val_set)):
        _check_single(name, data)
        _check_samples(name, data)
    check_whole(_FITTING, "`val_set`", fit.val_set)
    if not _is_count(fit.validate_every) or fit.validate_every < 1:
        found = f"`validate_every` is {fit.validate_every!r}"
        raise LoopError(_FITTING, found=found, fix="Give a number of epochs, 1 or more.")
    _check_sizes(fit)
    check_loader_options(_FITTING, "`loader`", fit.loader)
    options = [*inspect.signature(Loop.prepare).parameters, *inspect.signature(DistributedDataParallel).parameters]
    check_names(
        _FITTING, "`ddp`", fit.ddp, [name for name in options if name not in ("self", "things", "more", "module")]
    )
    _check_checkpoints(fit)
    _check_step(trainer, has_own_step)
    if not has_own_step or fit.val_set is not None:
        check_forward(_FITTING, trainer.model, trainer.has_own_forward)
    _check_watched(trainer, fit, has_own_step)


def _check_single(name: str, data: object) -> None:
    """Raise LoopError for several datasets in a mapping or a sequence."""
    if isinstance(data, Mapping) and data and 0 not in data:
        several = f"a {type(data).__name__} of {', '.join(map(repr, data))}"
    elif isinstance(data, list | tuple) and any(isinstance(one, Dataset | DataLoader) for one in data):
        several = f"a {type(data).__name__} of {len(data)}: {', '.join(type(one).__name__ for one in data[:4])}"
    else:
        return
    fix = "Give one dataset; torch.utils.data.ConcatDataset joins several."
    if name == "val_set":
        fix += " trainer.evaluate(data) measures each of the others after the fit."
    raise LoopError(_FITTING, found=f"`{name}` is {several}, and a fit takes one dataset", fix=fix)


def _check_samples(name: str, data: object) -> None:
    """Raise LoopError for an empty dataset, whose mean loss would be NaN."""
    dataset = data.dataset if isinstance(data, DataLoader) else data
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__") and not len(dataset):
        found = f"`{name}` is empty: a {type(dataset).__name__} of 0 samples"
        fix = "Look at where its samples come from." + " Without a `val_set` nothing is validated." * (
            name == "val_set"
        )
        raise LoopError(_FITTING, found=found, fix=fix)


def check_goal(epochs: int | None, until_epoch: int | None) -> None:
    """Raise LoopError if both are given: the number of further epochs and the total."""
    if epochs is not None and until_epoch is not None:
        found = f"`epochs={epochs!r}`, so many more, and `until_epoch={until_epoch!r}`, so many in all"
        raise LoopError(_FITTING, found=found, fix="Give one of the two.")


def check_loader_options(did: str, what: str, options: Iterable[str]) -> None:
    """Raise LoopError for names that are not options of any loader."""
    functions = (make_loader, make_stream_loader, shard_loader, DataLoader.__init__)
    named = (name for function in functions for name in inspect.signature(function).parameters)
    known = [name for name in dict.fromkeys(named) if name not in (*_OWN, "batch_size", "sampler", "batch_sampler")]
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


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _check_sizes(fit: FitOptions) -> None:
    if isinstance(fit.train_set, DataLoader) or hasattr(fit.train_set, "iterate"):
        return
    given = [name for name, size in fit.sizes.items() if size is not None]
    if len(given) != 1:
        found = f"{' and '.join(map(repr, given)) or 'no batch size'}, and a {type(fit.train_set).__name__}"
        fix = "Give `global_batch_size`, of all ranks together, or `batch_size_per_rank`."
        raise LoopError(_FITTING, found=found, fix=fix)


def _check_checkpoints(fit: FitOptions) -> None:
    options = fit.checkpoints
    known = [field.name for field in dataclasses.fields(CheckpointOptions)]
    check_names(_FITTING, "`checkpoints`", options, known)
    more = [name for name in options if name not in ("checkpoint_dir", "resume")]
    if more and options["checkpoint_dir"] is None:
        found = f"`checkpoints` with {', '.join(map(repr, more))}, and no `checkpoint_dir`: nothing would be saved"
        raise LoopError(_FITTING, found=found, fix="Give a `checkpoint_dir`.")


def _check_step(trainer: Trainer, has_own_step: bool) -> None:
    if not any(parameter.requires_grad for parameter in trainer.model.parameters()):
        found = "all parameters of the model are frozen, so there is nothing to train"
        raise LoopError(_FITTING, found=found, fix='Unfreeze some: `ddpilot.unfreeze(model, "head")`.')
    if has_own_step:
        return
    if trainer.loss_fn is None:
        raise LoopError(_FITTING, found="no `loss_fn`", fix="Give one, or override `train_batch`.")
    for optimizer in trainer.optimizers.values():
        if isinstance(optimizer, LBFGS):
            found = "LBFGS, whose step calls the model several times"
            raise LoopError(_FITTING, found=found, fix="Use another optimizer, or override `train_batch`.")


def _check_watched(trainer: Trainer, fit: FitOptions, has_own_step: bool) -> None:
    """Check monitored names against the columns of the history, unless user code may add columns."""
    if has_own_step or any(not type(one).__module__.startswith("ddpilot.") for one in trainer.callbacks):
        return
    validation = [] if fit.val_set is None else [f"val_{name}" for name in trainer.all_metrics]
    known = ["loss", *validation, *BOOKKEEPING]
    best = str(fit.checkpoints.get("best") or "").split()
    watched = [("`checkpoints` with best", best[1])] if len(best) == 2 else []
    for callback in trainer.callbacks:
        if isinstance(name := getattr(callback, "monitor", None), str):
            watched.append((type(callback).__name__, name))
    for who, name in watched:
        if name not in known and name.split(".")[0] not in known:
            needs = " There is no `val_set`." if name.startswith("val_") and fit.val_set is None else ""
            raise LoopError(
                _FITTING, found=f"{who} watches {name!r}, which no epoch will have", fix=suggest(name, known) + needs
            )
