# SPDX-License-Identifier: Apache-2.0
"""`Schedule`: sets a value of an optimizer or a model as a function of the update or epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from ddpilot.errors import LoopError
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.run import Run


class Schedule(Callback):
    """Set `target` to `value(number)` before each update, or each epoch, on all ranks.

    - `target`: a key of the optimizers' parameter groups, such as "weight_decay", "momentum" or "betas": it is set in
      each group that has it. Or an attribute of the model, such as "model.temperature" or "model.head.dropout.p"; a
      tensor is filled in place.
    - `value`: a function of the number of completed updates (`by="update"`, the default) or epochs (`by="epoch"`), from
      0.
    - `group`: index of one parameter group; None (default): all.
    - `optimizer`: name of one optimizer; None (default): all.

    The value depends on the number only, so it is correct in a run that resumes from a checkpoint. Raises LoopError
    before the first epoch if the target does not exist, or for "lr" together with a scheduler.
    """

    ranks = "all"

    def __init__(
        self,
        target: str,
        value: Callable[[int], Any],
        *,
        by: Literal["update", "epoch"] = "update",
        group: int | None = None,
        optimizer: str | None = None,
    ) -> None:
        if by not in ("update", "epoch"):
            raise LoopError(f"scheduling {target!r}", found=f"`by` is {by!r}", fix="Use 'update' or 'epoch'.")
        self._target = target
        self._value = value
        self._by = by
        self._group = group
        self._optimizer = optimizer

    def on_fit_start(self, run: Run) -> None:
        if self._target == "lr" and run.schedulers:
            raise self._error("a scheduler also sets it", "Leave one of them out.", run)
        self._set(run)

    def on_epoch_start(self, run: Run) -> None:
        self._set(run)

    def on_update_end(self, run: Run) -> None:
        if self._by == "update":
            self._set(run)

    def _set(self, run: Run) -> None:
        value = self._value(run.update if self._by == "update" else run.epoch)
        if self._target.startswith("model."):
            self._set_attribute(run, value)
            return
        for group in self._groups(run):
            old = group[self._target]
            group[self._target] = old.fill_(value) if isinstance(old, torch.Tensor) else value

    def _groups(self, run: Run) -> list[dict[str, Any]]:
        chosen: Mapping[str, Any] = run.optimizers
        if self._optimizer is not None:
            if self._optimizer not in chosen:
                raise self._error(f"no optimizer {self._optimizer!r}", f"The optimizers are {', '.join(chosen)}.", run)
            chosen = {self._optimizer: chosen[self._optimizer]}
        groups = [
            group
            for optimizer in chosen.values()
            for index, group in enumerate(optimizer.param_groups)
            if self._group in (None, index) and self._target in group
        ]
        if not groups:
            known = dict.fromkeys(key for o in chosen.values() for group in o.param_groups for key in group)
            keys = ", ".join(key for key in known if key != "params")
            raise self._error(
                "no parameter group has it", f"The keys are {keys}; for the model use 'model.<attribute>'.", run
            )
        return groups

    def _set_attribute(self, run: Run, value: Any) -> None:
        *path, name = self._target.split(".")[1:]
        owner: Any = run.model
        try:
            for part in path:
                owner = getattr(owner, part)
            old = getattr(owner, name)
        except AttributeError as error:
            raise self._error(f"{error}", "Give the attribute its first value in the model's __init__.", run) from error
        if isinstance(old, torch.Tensor):
            with torch.no_grad():
                old.fill_(value)
        else:
            setattr(owner, name, value)

    def _error(self, found: str, fix: str, run: Run) -> LoopError:
        return LoopError(f"scheduling {self._target!r}", found=found, fix=fix, rank=run.loop.rank)
