# SPDX-License-Identifier: Apache-2.0
"""`LRMonitor` and `Norms`: record learning rates, and norms of gradients and weights, right before a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddpilot.trainer.callback import Callback
from ddpilot.trainer.callbacks.log_rows import check_every, plain
from ddpilot.trainer.run import Run


class LRMonitor(Callback):
    """Record the learning rate of each parameter group every `every` updates (default 10), on rank 0.

    Records the rate that the update used, not the one that a scheduler set after it. Its name in logs is "lr", "lr.1"
    for a second group, "lr.name" with several optimizers. `also`: further values of the groups, such as "weight_decay".
    Raises LoopError for `every` below 1.
    """

    def __init__(self, *, every: int = 10, also: tuple[str, ...] = ()) -> None:
        self._every = check_every("LRMonitor", every)
        self._names = ("lr", *also)
        self._hooks: BeforeSteps | None = None
        self.rows: list[dict[str, Any]] = []
        """{"update": ..., "lr": ...} for every fit."""

    def on_fit_start(self, run: Run) -> None:
        self.rows = [row for row in self.rows if row["update"] <= run.update]
        self._hooks = BeforeSteps(run, lambda *step: self._look(run, *step))

    def on_update_end(self, run: Run) -> None:
        if run.update % self._every == 0:
            names = [name for name in run.values if name.partition(".")[0] in self._names]
            self.rows.append({"update": run.update, **{name: run.values[name] for name in names}})

    def on_fit_end(self, run: Run) -> None:
        self._remove()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._remove()

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def _look(self, run: Run, name: str, optimizer: Optimizer, update: int) -> None:
        if update % self._every:
            return
        for place, group in enumerate(optimizer.param_groups):
            for what in self._names:
                if what in group:
                    key = label(name, run, what) + (f".{place}" if place else "")
                    run.values[key] = plain(group[what])

    def _remove(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None


class Norms(Callback):
    """Record the norms of gradients and weights every `every` updates (default 50), on rank 0.

    The gradients are those of all samples as the optimizer uses them: after clipping. The weights are those before the
    update, of parameters with a gradient. Names in logs are "grad_norm" and "param_norm", or "grad_norm.name" with
    several optimizers. `layers`: also records each direct child of the model, such as "grad_norm.encoder". Does not
    wait for the device: values are read at the next recorded update, at the end of an epoch, or when a log writes them.
    Raises LoopError for `every` below 1.
    """

    def __init__(self, *, every: int = 50, layers: bool = False) -> None:
        self._every = check_every("Norms", every)
        self._layers = layers
        self._hooks: BeforeSteps | None = None
        self._waiting: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        """{"update": ..., "grad_norm": ..., "param_norm": ...} for every fit."""

    def on_fit_start(self, run: Run) -> None:
        self.rows = [row for row in self.rows if row["update"] <= run.update]
        self._hooks = BeforeSteps(run, lambda *step: self._look(run, *step))

    def on_epoch_end(self, run: Run) -> None:
        self._read()

    def on_fit_end(self, run: Run) -> None:
        self._remove()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._remove()

    def state_dict(self) -> dict[str, Any]:
        self._read()
        return {"rows": self.rows}

    def _look(self, run: Run, name: str, optimizer: Optimizer, update: int) -> None:
        if update % self._every:
            return
        if self._waiting.get("update") != update:
            self._read()
            self._waiting = {"update": update}
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        found = _norms(held, label(name, run, ""), optimizer)
        if self._layers:
            layers: dict[str, list[torch.Tensor]] = {}
            ids = {id(parameter) for parameter in held}
            for full, parameter in run.model.named_parameters():
                if id(parameter) in ids:
                    layers.setdefault(full.partition(".")[0], []).append(parameter)
            for layer, parameters in layers.items():
                found |= _norms(parameters, f"{label(name, run, '')}.{layer}", optimizer)
        self._waiting |= found
        run.values |= found

    def _read(self) -> None:
        if self._waiting:
            self.rows.append({name: plain(value) for name, value in self._waiting.items()})
            self._waiting = {}

    def _remove(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None


@torch.no_grad()
def _norms(parameters: list[torch.Tensor], suffix: str, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    gradient = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    # A fused optimizer unscales fp16 gradients itself, in its step.
    scale = getattr(optimizer, "grad_scale", None)
    return {
        f"grad_norm{suffix}": gradient if scale is None else gradient / scale.to(gradient.device),
        f"param_norm{suffix}": torch.nn.utils.get_total_norm(parameters),
    }


class BeforeSteps:
    """Calls `look(name, optimizer, update)` before each step of each optimizer of a run, until `remove`.

    `update`: number of the update that the step belongs to, as `Run.update` gives it afterwards.
    """

    def __init__(self, run: Run, look: Callable[[str, Optimizer, int], None]) -> None:
        self._run = run
        self._look = look
        self._batch: tuple[int, int] | None = None
        self._stepped: set[str] = set()  # in this update
        self._update = 0
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._hook(name)) for name, optimizer in run.optimizers.items()
        ]

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            now = self._run.loop.batch
            batch = None if now is None else (now.epoch, now.index)
            if batch != self._batch or name in self._stepped:
                self._batch, self._update = batch, self._run.update + 1
                self._stepped.clear()
            self._stepped.add(name)
            self._look(name, optimizer, self._update)

        return hook


def label(name: str, run: Run, what: str) -> str:
    """Return `what` with one optimizer, "what.name" with several."""
    return what if len(run.optimizers) == 1 else f"{what}.{name}"
