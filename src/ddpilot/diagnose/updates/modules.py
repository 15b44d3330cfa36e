# SPDX-License-Identifier: Apache-2.0
"""Observe the modules of a rank's first forward passes: where tensors are, and which layers depend on the batch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional

from ddpilot.data.nested import iterate_tensors
from ddpilot.diagnose.updates.changes import DROPOUTS
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.tensors import fingerprint, num_rows_of

_MAX_NAMED = 200


class ModuleObserver:
    """The part of the probe that sees modules. `is_first`: until the first update has ended."""

    def __init__(self) -> None:
        self.is_first = True
        self.expects_inputs = True
        """The next module that is called is the outermost one of a forward pass."""
        self.inputs: list[int] = []
        self.num_rows = 0
        self.num_dropped_out = 0
        self.batch_norms: list[str] = []
        self.placements: dict[str, str] = {}
        self.device = _device_of_rank()

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        """Start observing; returns the functions that stop it."""
        handle = torch.nn.modules.module.register_module_forward_pre_hook(notes.safely(self._before_forward))
        dropouts = [notes.around(functional, name, before=self._drop) for name in DROPOUTS]
        attention = notes.around(functional, "scaled_dot_product_attention", before=self._attend)
        return [handle.remove, *dropouts, attention, notes.around(functional, "batch_norm", before=self._normalize)]

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
        if not self.is_first or len(self.placements) > _MAX_NAMED:
            return
        name = type(module).__name__
        if isinstance(module, torch.nn.RNNBase) and module.dropout > 0 and module.training:
            self.num_dropped_out += 1
        for kind, tensors in (
            ("parameter", module.named_parameters(recurse=False)),
            ("buffer", module.named_buffers(recurse=False)),
        ):
            for path, tensor in tensors:
                self.placements.setdefault(f"{kind} `{path}` of {name}", str(tensor.device))
        for number, argument in enumerate(args):
            for tensor in iterate_tensors(argument):
                self.placements.setdefault(f"argument {number} of {name}", str(tensor.device))


@functools.cache
def _device_of_rank() -> str:
    if not torch.accelerator.is_available():
        return "cpu"
    kind = torch.accelerator.current_accelerator()
    return f"{kind}:{int(os.environ.get('LOCAL_RANK', '0')) % max(1, torch.accelerator.device_count())}"
