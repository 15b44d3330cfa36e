# SPDX-License-Identifier: Apache-2.0
"""Detect that a DDP model with `find_unused_parameters` has no unused parameters."""

from __future__ import annotations

from typing import Any

from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.parameters.ddp_model import DdpModel

NUM_BACKWARDS = 9
"""DDP reports unused parameters for its first 10 backwards, for each of them during the next one."""

_MAX_NAMES = 100


class UnusedCount:
    """Follows the first backwards of `model`; call `step` before each optimizer step."""

    def __init__(self, model: DdpModel, notes: Notes) -> None:
        self.is_over = False
        self._model = model
        self._notes = notes
        self._num_bytes = 0
        self._names: set[str] = set()

    def step(self) -> None:
        """Add what DDP reports; after the last of the first backwards, note it."""
        num = self._model.reductions.num_forwards
        ddp: Any = self._model.find()
        self.is_over = self.is_over or ddp is None
        if self.is_over or num < 2:
            return
        data = ddp._get_ddp_logging_data()
        if "unused_parameter_size" not in data and num > NUM_BACKWARDS:
            self.is_over = True  # a torch that does not report it
            return
        self._num_bytes = max(self._num_bytes, int(data.get("unused_parameter_size", 0)))
        for name, parameter in ddp.module.named_parameters():
            if parameter.requires_grad and parameter.grad is None and len(self._names) < _MAX_NAMES:
                self._names.add(name)
        if num > NUM_BACKWARDS:
            self.is_over = True
            self._notes.write(
                "unused",
                group=self._model.group,
                ordinal=self._model.ordinal,
                num_backwards=NUM_BACKWARDS,
                num_bytes=self._num_bytes,
                names=sorted(self._names),
                site=self._model.site,
            )
