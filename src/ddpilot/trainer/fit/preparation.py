# SPDX-License-Identifier: Apache-2.0
"""Prepare models, optimizers, schedulers and loaders of a trainer with the loop of a fit; copies of a trainer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from ddpilot.data.options import WORKER_OPTIONS
from ddpilot.data.shards.files import is_dataset_of_shards
from ddpilot.errors import LoopError
from ddpilot.trainer.core import FitState, Position, TrainerCore
from ddpilot.trainer.fit_options import SIZES, FitOptions
from ddpilot.trainer.history import History
from ddpilot.trainer.optimizers import own_attributes, relink, restore_attributes
from ddpilot.trainer.run import Run, trained_parts
from ddpilot.training.batch_groups import LimitedLoader, Loader
from ddpilot.training.loop import Loop
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.models.optimizers import ShardedState
from ddpilot.training.models.sharding import is_sharded
from ddpilot.training.options import EACH_UPDATE


def prepare_fit(trainer: TrainerCore, loop: Loop, fit: FitOptions) -> tuple[Run, FitState]:
    """Prepare and track everything of `trainer` with `loop`; return the run and the state of its callbacks."""
    model, options = trainer.model, {"compile": trainer.compile, **fit.ddp}
    shard = options.pop("shard", None)
    parts = trained_parts(model) or {"": model}
    if shard not in (None, "optimizer"):
        options["shard"], shard = shard, None
    wrapped = [  # sharded by an earlier fit on these ranks
        loop.prepare(part) if is_sharded(part) else loop.prepare(part, **options) for part in parts.values()
    ]
    for name, optimizer in trainer.optimizers.items():
        if not isinstance(optimizer, ShardedState):  # divided by an earlier fit on these ranks
            move_optimizer_state(optimizer)
            trainer.optimizers[name] = loop.prepare(optimizer, shard=shard)
        else:
            loop.prepare(optimizer)
    for name, scheduler in trainer.schedulers.items():
        relink(scheduler, trainer.optimizers[name])
        loop.prepare(scheduler)
    if trainer.ema is not None:
        loop.prepare(trainer.ema, shard=options.get("shard"))
    state = FitState(trainer.history, trainer.callbacks)
    loop.track(story=state)  # the name of its entry in checkpoints
    run = Run(
        loop=loop,
        model=unwrap(wrapped[0]) if "" in parts else model,
        wrapped=wrapped[0] if "" in parts else dict(zip(parts, wrapped, strict=True)),
        optimizers=trainer.optimizers,
        schedulers={
            name: one
            for name, one in trainer.schedulers.items()
            if trainer.scheduler_every == EACH_UPDATE and not isinstance(one, ReduceLROnPlateau)
        },
        ema=trainer.ema,
        history=trainer.history,
        num_epochs=fit.num_epochs(loop.epoch),
        until_epoch=fit.num_epochs(0) if fit.is_total else None,
        max_updates=fit.max_updates,
        validate_every=fit.validate_every,
    )
    return run, state


def move_optimizer_state(optimizer: Optimizer) -> None:
    """Move optimizer state left by an earlier fit to the device of the parameters."""
    first = optimizer.param_groups[0]["params"][0]
    if optimizer.state and first.device.type != "cpu":
        optimizer.load_state_dict(optimizer.state_dict())


def copy_trainer(trainer: TrainerCore) -> TrainerCore:
    """Return a trainer before its first update, without callbacks, with copies of everything that a fit changes."""
    names = ("model", "loss_fn", "optimizers", "schedulers", "ema", "metrics")
    own = own_attributes(trainer.optimizers)
    parts, own = copy.deepcopy(({name: getattr(trainer, name) for name in names}, own))
    restore_attributes(parts["optimizers"], own)
    trial = copy.copy(trainer)
    vars(trial).update(parts, callbacks=[], history=History(), position=Position(), findings=())
    return trial


_OF_VALIDATION = (*SIZES, "collate_fn", *WORKER_OPTIONS)
"""Options that the loader of a validation set has from that of the training data."""


def make_loaders(fit: FitOptions, loop: Loop) -> tuple[Loader, dict[str, Loader]]:
    """Return the loader of the training data, and those of the validation sets by name."""
    train = make_loader_of(fit.train_set, loop, fit.loader)
    options = {name: value for name, value in fit.loader.items() if name in _OF_VALIDATION}
    if isinstance(fit.train_set, DataLoader):
        options |= {"global_batch_size": fit.train_set.batch_size, "batch_size_per_rank": None}
    val = {
        name: make_loader_of(data, loop, {} if isinstance(data, DataLoader) else options)
        for name, data in fit.val_sets.items()
    }
    return train, val


def limit_loaders(loaders: tuple[Loader, dict[str, Loader]], fit: FitOptions) -> tuple[Loader, dict[str, Loader]]:
    """Return `loaders` up to the limits of `overfit_batches` and `limit_batches`."""
    (train, val), limits = loaders, fit.limit_batches
    if fit.overfit_batches is not None:
        train = LimitedLoader(train, fit.overfit_batches, is_fixed=True)
    if "train" in limits:
        train = LimitedLoader(train, limits["train"])
    if "validation" in limits:
        val = {name: LimitedLoader(one, limits["validation"]) for name, one in val.items()}
    return train, val


def make_loader_of(data: Any, loop: Loop, options: Mapping[str, Any]) -> Loader:
    """Return this rank's loader of `data`. Not collective. Raises DataError and LoopError.

    `options`: those of `LoaderOptions`, with a batch size for a dataset; a DataLoader has its own, and its own workers
    and order.
    """
    if hasattr(data, "iterate"):
        made: Loader = data
        return made
    if isinstance(data, DataLoader):
        return loop.prepare_data_loader(data, **_options_of_loader(data, options))
    is_stream = isinstance(data, IterableDataset) and not is_dataset_of_shards(data)
    return loop.loader(data, **{name: one for name, one in options.items() if not is_stream or name != "shuffle"})


def _options_of_loader(data: DataLoader[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: size for name in SIZES if (size := options.get(name)) is not None}
    for name, size in given.items():
        if size != data.batch_size:
            raise LoopError(
                "preparing a DataLoader",
                found=f"`{name}={size}`, and the loader has `batch_size={data.batch_size}`",
                fix=f"Leave `{name}` out, or give the dataset instead of the loader.",
            )
    kept = {name: value for name, value in options.items() if name not in ("shuffle", "num_workers", *SIZES)}
    return {**kept, "batch_size_per_rank": "batch_size_per_rank" in given}
