# SPDX-License-Identifier: Apache-2.0
"""Observe the modules of a rank's first forward passes: which layers depend on the batch, and where tensors are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional

from ddpilot.diagnose.updates.changes import DROPOUTS
from ddpilot.diagnose.updates.placements import PlacementObserver
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.tensors import fingerprint, num_rows_of


class ModuleObserver:
    """The part of the probe that sees modules. `on_seen` is called after each model and loss of the first update."""

    def __init__(self, on_seen: Callable[[], None]) -> None:
        self._is_first = True
        self.expects_inputs = True
        """The next module that is called is the outermost one of a forward pass."""
        self.inputs: list[int] = []
        self.num_rows = 0
        self.num_dropped_out = 0
        self.batch_norms: list[str] = []
        self.has_evaluated = False
        """A module was called without gradients."""
        self.placements = PlacementObserver(on_seen)

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        """Start observing; returns the functions that stop it."""
        handle = torch.nn.modules.module.register_module_forward_pre_hook(notes.safely(self._before_forward))
        dropouts = [notes.around(functional, name, before=self._drop) for name in DROPOUTS]
        attention = notes.around(functional, "scaled_dot_product_attention", before=self._attend)
        norm = notes.around(functional, "batch_norm", before=self._normalize)
        return [handle.remove, *dropouts, attention, norm, *self.placements.install(notes)]

    def end_first_update(self) -> None:
        """Stop observing what the first update shows."""
        self._is_first = self.placements.is_on = False

    def _drop(self, _: Any, p: float = 0.5, training: bool = True, *_args: Any, **_kwargs: Any) -> None:
        self.num_dropped_out += bool(training and p > 0)

    def _attend(self, *args: Any, **kwargs: Any) -> None:
        self.num_dropped_out += bool((args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0)

    def _normalize(self, *args: Any, **kwargs: Any) -> None:
        is_training = args[5] if len(args) > 5 else kwargs.get("training", False)
        if is_training and torch.is_grad_enabled() and not self.batch_norms:
            self.batch_norms.append("BatchNorm")

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if self.expects_inputs and torch.is_grad_enabled():
            self.expects_inputs = False
            seen = fingerprint(list(args))
            self.inputs.append(seen.checksum if seen else 0)
            self.num_rows += num_rows_of(list(args)) or 0
        self.has_evaluated = self.has_evaluated or not torch.is_grad_enabled()
        if not self._is_first:
            return
        if isinstance(module, torch.nn.RNNBase) and module.dropout > 0 and module.training:
            self.num_dropped_out += 1
        self.placements.before_forward(module, args)
