# SPDX-License-Identifier: Apache-2.0
"""`Norms`: records the norms of gradients and weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ddpilot.trainer.callback import Callback
from ddpilot.trainer.callbacks.log_rows import check_every, plain
from ddpilot.trainer.callbacks.stepping import BeforeSteps, label
from ddpilot.trainer.run import Run


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
