# SPDX-License-Identifier: Apache-2.0
"""`FitOptions`, the arguments of one `Trainer.fit`, and their checks before a rank starts."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddpilot.checkpoint.remote.store import check_backend, is_url
from ddpilot.errors import LoopError
from ddpilot.trainer.checks import check_forward, check_loader_options, check_names, check_whole, is_count, suggest
from ddpilot.trainer.core import TrainerCore
from ddpilot.trainer.history import BOOKKEEPING
from ddpilot.training.loop import Loop
from ddpilot.training.options import EACH_EPOCH, CheckpointOptions, Interval
from ddpilot.training.step.weight_averages import WeightAverage

FITTING = "starting a fit"
"""What errors state as the failed action."""
SIZES = ("global_batch_size", "batch_size_per_rank")
"""Names of a loader's batch sizes."""
LIMITED = ("train", "validation")
"""Names of what `limit_batches` limits."""


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The arguments of one `fit`, sent to the ranks."""

    train_set: Any
    val_set: Any = None
    epochs: int | None = None
    """1, if neither `until_epoch` nor `max_updates` is given either."""
    until_epoch: int | None = None
    max_updates: int | None = None
    max_time_s: float | None = None
    validate_every: Interval = EACH_EPOCH
    checkpoints: Mapping[str, Any] = field(default_factory=lambda: {"checkpoint_dir": None, "resume": True})
    """Arguments of `Loop`: `checkpoint_dir`, `resume`, `keep` and so on."""
    validate_first: bool = False
    dry_run: bool = False
    other_data: bool = False
    check_finite: bool = True
    progress: bool | None = None
    limit_batches: Mapping[str, int] = field(default_factory=dict)
    """Largest numbers of global batches per epoch of "train", and per pass of "validation"."""
    overfit_batches: int | None = None
    """Number of global batches of epoch 0 of which every epoch consists; None: no such limit."""
    loader: Mapping[str, Any] = field(default_factory=dict)
    """Options of the training data's loader."""
    ddp: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.epochs, self.until_epoch, self.max_updates) == (None, None, None):
            object.__setattr__(self, "epochs", 1)

    @property
    def checkpoint_dir(self) -> Any:
        """The directory of the checkpoints; None: no checkpoints."""
        return self.checkpoints["checkpoint_dir"]

    @property
    def val_sets(self) -> dict[str, Any]:
        """The validation sets by name; the name of a single one is ""."""
        if self.val_set is None:
            return {}
        return dict[str, Any](self.val_set) if _is_named(self.val_set) else {"": self.val_set}

    @property
    def is_total(self) -> bool:
        """True if the goal is a total over all fits, not a number of further epochs."""
        return self.until_epoch is not None or self.max_updates is not None or self.checkpoint_dir is not None

    @property
    def goal(self) -> str:
        """The argument that sets the end of the fit: "epochs=5"."""
        given = {"until_epoch": self.until_epoch, "max_updates": self.max_updates}
        return next((f"{name}={value}" for name, value in given.items() if value is not None), f"epochs={self.epochs}")

    def num_epochs(self, epoch: int) -> int | None:
        """Return the number of epochs at which a fit that starts at `epoch` ends; None with `max_updates`."""
        if self.max_updates is not None:
            return None
        number = self.until_epoch if self.epochs is None else self.epochs
        assert number is not None  # one of the three is set
        return number if self.is_total else epoch + number


def read_limits(given: int | Mapping[str, int] | None) -> dict[str, int]:
    """Return the limits of "train" and "validation" that were given. Raises LoopError."""
    if given is None:
        return {}
    limits = dict(given) if isinstance(given, Mapping) else dict.fromkeys(LIMITED, given)
    check_names(FITTING, "`limit_batches`", limits, LIMITED)
    for name, limit in limits.items():
        if not is_count(limit) or limit < 1:
            found = f"`limit_batches` of {name} is {limit!r}"
            raise LoopError(FITTING, found=found, fix="Give a number of batches, 1 or more.")
    return limits


def read_interval(given: object, name: str, *, by_updates: bool) -> Interval:
    """Parse `validate_every` or `save_every`; an int counts updates if `by_updates`, else epochs. Raises LoopError."""
    return Interval.parse(given, did=FITTING, name=name, unit="updates" if by_updates else "epochs")


def read_validate_every(given: int | str | None, max_updates: int | None) -> Interval:
    """Parse `validate_every`; an int counts updates with `max_updates`, otherwise epochs. Raises LoopError."""
    return read_interval("1 epoch" if given is None else given, "validate_every", by_updates=max_updates is not None)


def read_save_every(given: int | str) -> str:
    """Parse `save_every`, and return it with its unit; an int counts updates. Raises LoopError."""
    return str(read_interval(given, "save_every", by_updates=True))


def has_size(options: Mapping[str, Any]) -> bool:
    """True if a batch size is among the `options` of a loader."""
    return any(options.get(name) is not None for name in SIZES)


def check_fit(trainer: TrainerCore, fit: FitOptions) -> None:
    """Raise LoopError for arguments that would fail on every rank, before a rank starts."""
    for name, unit in (("epochs", "epochs"), ("until_epoch", "epochs"), ("max_updates", "updates")):
        number = getattr(fit, name)
        if number is not None and (not is_count(number) or number < 0):
            raise LoopError(FITTING, found=f"`{name}` is {number!r}", fix=f"Give a whole number of {unit}, 0 or more.")
    if fit.train_set is None:
        raise LoopError(FITTING, found="`train_set` is None", fix="Give a dataset or a DataLoader.")
    _check_single("`train_set`", fit.train_set)
    _check_samples("`train_set`", fit.train_set)
    _check_validation_sets(trainer, fit)
    if fit.validate_first and fit.val_set is None:
        raise LoopError(FITTING, found="`validate_first`, and no `val_set`", fix="Give a `val_set`.")
    _check_overfit(fit)
    _check_sizes(fit)
    check_loader_options(FITTING, "`loader`", fit.loader)
    options = [*inspect.signature(Loop.prepare).parameters, *inspect.signature(DistributedDataParallel).parameters]
    check_names(
        FITTING, "`ddp`", fit.ddp, [name for name in options if name not in ("self", "things", "more", "module")]
    )
    _check_checkpoints(fit)
    _check_step(trainer, fit)
    if not trainer.has_own_step or (fit.val_set is not None and not trainer.has_own_validation):
        check_forward(FITTING, trainer.model, trainer.has_own_forward)


def _check_single(name: str, data: object) -> None:
    """Raise LoopError for several datasets in a mapping or a sequence."""
    if isinstance(data, Mapping) and data and 0 not in data:
        several = f"a {type(data).__name__} of {', '.join(map(repr, data))}"
    elif isinstance(data, list | tuple) and any(isinstance(one, Dataset | DataLoader) for one in data):
        several = f"a {type(data).__name__} of {len(data)}: {', '.join(type(one).__name__ for one in data[:4])}"
    else:
        return
    fix = "Give one dataset; torch.utils.data.ConcatDataset joins several."
    if "val_set" in name:
        fix = 'Give one dataset, or several by name: {"clean": data, "noisy": more}.'
    raise LoopError(FITTING, found=f"{name} is {several}, and a fit takes one dataset", fix=fix)


def _is_named(val_set: object) -> bool:
    """True for several validation sets by name; a mapping with the key 0 is a dataset itself."""
    return isinstance(val_set, Mapping) and 0 not in val_set


def val_prefix(name: str) -> str:
    """Return what the columns of a validation set begin with: "val_" for a single one, which has the name ""."""
    return f"val_{name}_" if name else "val_"


def _check_validation_sets(trainer: TrainerCore, fit: FitOptions) -> None:
    """Raise LoopError for invalid validation sets, and for names that would give two columns the same name."""
    if fit.val_set is not None and not fit.val_sets:
        raise LoopError(FITTING, found="`val_set` is an empty dict", fix="Give a dataset, or several by name; or None.")
    columns: dict[str, tuple[str, str]] = {}
    name: Any
    for name, data in fit.val_sets.items():
        what = "`val_set`"
        if _is_named(fit.val_set):
            what += f" {name!r}"
            if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
                found = f"a validation set with the name {name!r}"
                raise LoopError(FITTING, found=found, fix='Use letters, digits, "_" and "-", as in "clean".')
            if data is None:
                raise LoopError(FITTING, found=f"{what} is None", fix="Give a dataset, or leave the name out.")
        _check_single(what, data)
        _check_samples(what, data)
        check_whole(FITTING, what, data)
        for metric in () if trainer.has_own_validation else trainer.all_metrics:
            column = f"{val_prefix(name)}{metric}"
            if column in columns:
                pairs = " and ".join(f"{one!r} of {of!r}" for of, one in (columns[column], (name, metric)))
                found = f"metrics {pairs}, which would both be {column!r} in the history"
                raise LoopError(FITTING, found=found, fix="Rename a validation set or a metric.")
            columns[column] = name, metric


def _check_samples(name: str, data: object) -> None:
    """Raise LoopError for an empty dataset, as its mean loss would be NaN."""
    dataset = data.dataset if isinstance(data, DataLoader) else data
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__") and not len(dataset):
        found = f"{name} is empty: a {type(dataset).__name__} of 0 samples"
        fix = "Check where its samples come from." + " `val_set` is optional." * ("val_set" in name)
        raise LoopError(FITTING, found=found, fix=fix)


def check_goal(epochs: object, until_epoch: object, max_updates: object) -> None:
    """Raise LoopError if several of them are given."""
    meanings = {
        "epochs": (epochs, "a number of further epochs"),
        "until_epoch": (until_epoch, "a total"),
        "max_updates": (max_updates, "a total of updates"),
    }
    given = [f"`{name}={value!r}`, {meaning}" for name, (value, meaning) in meanings.items() if value is not None]
    if len(given) > 1:
        raise LoopError(
            FITTING, found=", and ".join(given), fix=f"Give one of the {'two' if len(given) == 2 else 'three'}."
        )


def _check_overfit(fit: FitOptions) -> None:
    number = fit.overfit_batches
    if number is None:
        return
    if not is_count(number) or number < 1:
        fix = "Give a number of batches, 1 or more."
        raise LoopError(FITTING, found=f"`overfit_batches` is {number!r}", fix=fix)
    if "train" in fit.limit_batches:
        found = f"`overfit_batches={number}` and `limit_batches` of train"
        raise LoopError(FITTING, found=found, fix="Give one of the two; limit_batches={'validation': n} may stay.")


def _check_sizes(fit: FitOptions) -> None:
    if isinstance(fit.train_set, DataLoader) and fit.train_set.batch_size is None:
        for data in fit.val_sets.values():
            if not isinstance(data, DataLoader) and not hasattr(data, "iterate"):
                found = f"a {type(data).__name__} as `val_set`, and a DataLoader of batches of any size as `train_set`"
                raise LoopError(FITTING, found=found, fix="Give a DataLoader with a `batch_size` as `val_set`, too.")
    if isinstance(fit.train_set, DataLoader) or hasattr(fit.train_set, "iterate"):
        return
    given = [name for name in SIZES if fit.loader.get(name) is not None]
    if len(given) != 1:
        found = f"{' and '.join(map(repr, given)) or 'no batch size'}, and a {type(fit.train_set).__name__}"
        fix = "Give `global_batch_size`, the samples of all ranks together, or `batch_size_per_rank`."
        raise LoopError(FITTING, found=found, fix=fix)


def _check_checkpoints(fit: FitOptions) -> None:
    options = fit.checkpoints
    known = [field.name for field in dataclasses.fields(CheckpointOptions)]
    check_names(FITTING, "`checkpoints`", options, known)
    more = [name for name in options if name not in ("checkpoint_dir", "resume")]
    if more and options["checkpoint_dir"] is None:
        found = f"`checkpoints` with {', '.join(map(repr, more))}, and no `checkpoint_dir`: nothing would be saved"
        raise LoopError(FITTING, found=found, fix="Give a `checkpoint_dir`.")
    if is_url(options["checkpoint_dir"]):
        check_backend(options["checkpoint_dir"])
    if options.get("save_every") is not None:
        read_interval(options["save_every"], "save_every", by_updates=True)


def _check_step(trainer: TrainerCore, fit: FitOptions) -> None:
    if not any(parameter.requires_grad for parameter in trainer.model.parameters()):
        found = "all parameters of the model are frozen, so there is nothing to train"
        raise LoopError(FITTING, found=found, fix='Unfreeze some: `ddpilot.unfreeze(model, "head")`.')
    if trainer.has_own_step:
        return
    if trainer.loss_fn is None:
        raise LoopError(FITTING, found="no `loss_fn`", fix="Give one, or override `train_batch`.")
    _check_average(trainer, fit)
    if trainer.closure:
        _check_closure(trainer, fit)


def _check_average(trainer: TrainerCore, fit: FitOptions) -> None:
    """Raise LoopError if the BatchNorm statistics of an average would need the end of a stream."""
    average = trainer.ema
    is_endless = isinstance(fit.train_set, IterableDataset) and fit.max_updates is not None
    needs_all = isinstance(average, WeightAverage) and average.needs_batch_norm and "train" not in fit.limit_batches
    if is_endless and needs_all and average.options.batch_norm_batches is None:  # type: ignore[union-attr]
        found = "an equal average of a model with BatchNorm, whose statistics need an epoch, and a stream"
        raise LoopError(FITTING, found=found, fix="Pass Averaging(batch_norm_batches=100).")


def _check_closure(trainer: TrainerCore, fit: FitOptions) -> None:
    """Raise LoopError for options that an optimizer with a closure does not support."""
    name = type(next(iter(trainer.optimizers.values()))).__name__
    fix = "Leave that out; or use an optimizer that needs no closure."
    if len(trainer.optimizers) > 1:
        found = f"{len(trainer.optimizers)} optimizers, each of which would compute the loss again"
        fix = "Give one optimizer, or override `train_batch`."
    elif trainer.accumulate != 1:
        found = f"`accumulate` is {trainer.accumulate}, and a closure computes the loss of one batch"
        fix = "Use larger batches in place of `accumulate`."
    elif trainer.precision == "fp16":
        found, fix = "`precision` is 'fp16', whose gradients are scaled within the closure", "Use 'bf16' or 'fp32'."
    elif fit.ddp.get("shard") is not None:
        found = f"`ddp` with shard={fit.ddp['shard']!r}, so that each rank would step independently"
    else:
        return
    raise LoopError(f"fitting with a closure ({name})", found=found, fix=fix)


def check_monitors(trainer: TrainerCore, fit: FitOptions) -> None:
    """Check what callbacks and checkpoints monitor against the history's columns, unless user code may add columns."""
    has_own = trainer.has_own_step or trainer.has_own_validation
    if has_own or any(not type(one).__module__.startswith("ddpilot.") for one in trainer.callbacks):
        return
    validation = [f"{val_prefix(name)}{metric}" for name in fit.val_sets for metric in trainer.all_metrics]
    known = ["loss", *validation, *BOOKKEEPING]
    best = str(fit.checkpoints.get("best") or "").split()
    monitored = [("`checkpoints` with best", best[1])] if len(best) == 2 else []
    for callback in trainer.callbacks:
        if isinstance(name := getattr(callback, "monitor", None), str):
            monitored.append((type(callback).__name__, name))
    for source, name in monitored:
        if name not in known and name.split(".")[0] not in known:
            needs = " There is no `val_set`." if name.startswith("val_") and fit.val_set is None else ""
            found = f"{source} monitors {name!r}, which no epoch will have"
            raise LoopError(FITTING, found=found, fix=suggest(name, known) + needs)
