# SPDX-License-Identifier: Apache-2.0
"""Prepare the models, optimizers and schedulers of a trainer with the loop of a fit; copies of a trainer."""

from __future__ import annotations

import copy

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddpilot.trainer.core import FitState, Position, TrainerCore
from ddpilot.trainer.fit_options import FitOptions
from ddpilot.trainer.history import History
from ddpilot.trainer.optimizers import own_attributes, relink, restore_attributes
from ddpilot.trainer.run import Run, trained_parts
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
