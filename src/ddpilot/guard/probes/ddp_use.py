# SPDX-License-Identifier: Apache-2.0
"""Note what is wrapped in DDP or DataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpilot.guard.notes import SiteNote, WrappingNote
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.process_groups import describe_group, sequence_number

_MAX_PARAMETERS = 1024


class WrapProbe:
    """Observes models before DDP compares them: their parameters, and the buffers that DDP broadcasts."""

    name = "models to be wrapped"

    def install(self, notes: Notes) -> list[Callable[[], None]]:

        def before(_ddp: Any, module: nn.Module, *_args: Any, **named: Any) -> None:
            group = named.get("process_group") or dist.group.WORLD
            if group is None or not dist.is_initialized():
                return
            described = [
                [name, list(one.shape), str(one.dtype).removeprefix("torch."), one.requires_grad]
                for name, one in (*module.named_parameters(), *module.named_buffers())
            ]
            note = WrappingNote(
                group=describe_group(group),
                at=sequence_number(group),
                parameters=described[:_MAX_PARAMETERS],
                num_parameters=len(described),
                site=notes.site(),
            )
            notes.write("wrapping", note)

        ddp: Any = DistributedDataParallel
        return [notes.around(ddp, "__init__", before=before)]


class DataParallelProbe:
    """Observes `nn.DataParallel`; notes each model that trains through it once."""

    name = "nn.DataParallel"

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def install(self, notes: Notes) -> list[Callable[[], None]]:

        def before(model: Any, *_args: Any, **_kwargs: Any) -> None:
            if torch.is_grad_enabled() and model.training and id(model) not in self._seen and len(self._seen) < 64:
                self._seen.add(id(model))
                notes.write("data_parallel", SiteNote(site=notes.site()))

        return [notes.around(nn.DataParallel, "forward", before=before)]
