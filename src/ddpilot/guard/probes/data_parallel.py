# SPDX-License-Identifier: Apache-2.0
"""Note training with `nn.DataParallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddpilot.guard.probe import Notes


class DataParallelProbe:
    """Observes `nn.DataParallel`; notes each model that trains through it once."""

    name = "nn.DataParallel"

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def install(self, notes: Notes) -> Callable[[], None]:
        """Install the probe, see `Probe.install`."""

        def before(model: Any, *_args: Any, **_kwargs: Any) -> None:
            if torch.is_grad_enabled() and model.training and id(model) not in self._seen and len(self._seen) < 64:
                self._seen.add(id(model))
                notes.write("data_parallel", site=notes.site())

        return notes.around(nn.DataParallel, "forward", before=before)
