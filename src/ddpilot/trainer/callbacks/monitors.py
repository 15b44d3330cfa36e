# SPDX-License-Identifier: Apache-2.0
"""`LRMonitor` and `Norms`: record learning rates, and norms of gradients and weights, right before a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddpilot.trainer.callback import Callback
from ddpilot.trainer.callbacks.logs import check_every
from ddpilot.trainer.run import Run
from ddpilot.training.logs.loggers import plain
from ddpilot.training.models.registry import parameters_of
from ddpilot.training.models.sharding import total_norm


class _StepMonitor(Callback):
    """Base class of callbacks that measure right before each optimizer step, by hooks that `_measure` reads."""

    def __init__(self, every: int) -> None:
        self._every = check_every(type(self).__name__, every)
        self._handles: list[RemovableHandle] = []
        self._batch: tuple[int, int] | None = None
        self._stepped: set[str] = set()
        """Names of the optimizers that have stepped in this update."""
        self._update = 0
        self.rows: list[dict[str, Any]] = []
        """{"update": ..., and the values by name} for every fit."""

    def on_fit_start(self, run: Run) -> None:
        self.rows = [row for row in self.rows if row["update"] <= run.update]
        self._batch = None
        self._handles = [one.register_step_pre_hook(self._hook(run, name)) for name, one in run.optimizers.items()]

    def on_fit_end(self, run: Run) -> None:
        self._remove_hooks()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._remove_hooks()

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def _measure(self, run: Run, name: str, optimizer: Optimizer, update: int) -> None:
        """Measure before `optimizer` steps; `update` is the number of the update, as `Run.update` is afterwards."""
        raise NotImplementedError

    def _hook(self, run: Run, name: str) -> Callable[..., None]:
        def hook(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            current = run.loop.batch
            batch = None if current is None else (current.epoch, current.index)
            if batch != self._batch or name in self._stepped:
                self._batch, self._update = batch, run.update + 1
                self._stepped.clear()
            self._stepped.add(name)
            if self._update % self._every == 0:
                self._measure(run, name, optimizer, self._update)

        return hook

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class LRMonitor(_StepMonitor):
    """Record the learning rate of each parameter group every `every` updates (default 10), on rank 0.

    The recorded rate is the one that the update used, not the next one of a scheduler. Its name in logs is "lr", "lr.1"
    for a second group, "lr.name" with several optimizers. `also`: further values of the groups, such as "weight_decay".
    Raises LoopError for `every` below 1.
    """

    def __init__(self, *, every: int = 10, also: tuple[str, ...] = ()) -> None:
        super().__init__(every)
        self._names = ("lr", *also)

    def on_update_end(self, run: Run) -> None:
        if run.update % self._every == 0:
            names = [name for name in run.values if name.partition(".")[0] in self._names]
            self.rows.append({"update": run.update, **{name: run.values[name] for name in names}})

    def _measure(self, run: Run, name: str, optimizer: Optimizer, update: int) -> None:
        suffix = _suffix(run, name)
        for index, group in enumerate(optimizer.param_groups):
            for key in self._names:
                if key in group:
                    run.values[f"{key}{suffix}" + (f".{index}" if index else "")] = plain(group[key])


class Norms(_StepMonitor):
    """Record the norms of gradients and weights every `every` updates (default 50), on rank 0.

    The gradients are those of all samples as the optimizer uses them: after clipping. The weights are those before the
    update, of parameters with a gradient. Names in logs are "grad_norm" and "param_norm", or "grad_norm.name" with
    several optimizers. `layers`: also records each direct child of the model, such as "grad_norm.encoder". Does not
    wait for the device: values are read at the next recorded update, at the end of an epoch, or when a log writes them.
    Raises LoopError for `every` below 1.
    """

    _is_joint_if_sharded = True

    def __init__(self, *, every: int = 50, layers: bool = False) -> None:
        super().__init__(every)
        self._layers = layers
        self._waiting: dict[str, Any] = {}

    def on_epoch_end(self, run: Run) -> None:
        self._read()

    def state_dict(self) -> dict[str, Any]:
        self._read()
        return super().state_dict()

    def _measure(self, run: Run, name: str, optimizer: Optimizer, update: int) -> None:
        if self._waiting.get("update") != update:
            self._read()
            self._waiting = {"update": update}
        suffix = _suffix(run, name)
        held = [p for p in parameters_of(optimizer) if p.grad is not None]
        values = _norms(held, suffix, optimizer)
        if self._layers:
            layers: dict[str, list[torch.Tensor]] = {}
            ids = {id(parameter) for parameter in held}
            for full, parameter in run.model.named_parameters():
                if id(parameter) in ids:
                    layers.setdefault(full.partition(".")[0], []).append(parameter)
            for layer, parameters in layers.items():
                values |= _norms(parameters, f"{suffix}.{layer}", optimizer)
        self._waiting |= values
        run.values |= values

    def _read(self) -> None:
        if self._waiting:
            self.rows.append({name: plain(value) for name, value in self._waiting.items()})
            self._waiting = {}


@torch.no_grad()
def _norms(parameters: Sequence[torch.Tensor], suffix: str, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    gradient = total_norm([p.grad for p in parameters if p.grad is not None])
    # A fused optimizer unscales fp16 gradients itself, in its step.
    scale = getattr(optimizer, "grad_scale", None)
    return {
        f"grad_norm{suffix}": gradient if scale is None else gradient / scale.to(gradient.device),
        f"param_norm{suffix}": total_norm(parameters),
    }


def _suffix(run: Run, name: str) -> str:
    """Return the suffix of the values of optimizer `name`: "" if it is the only one, otherwise ".name"."""
    return "" if len(run.optimizers) == 1 else f".{name}"
