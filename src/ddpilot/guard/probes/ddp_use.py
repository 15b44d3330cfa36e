# SPDX-License-Identifier: Apache-2.0
"""Note the parameters that a rank is about to wrap in DDP: if ranks differ, its constructor fails without details."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.process_groups import describe_group, sequence_number

_MAX_PARAMETERS = 1024


class WrapProbe:
    """Observes models before DDP compares them: their parameters, and the buffers that DDP broadcasts."""

    name = "models to be wrapped"

    def install(self, notes: Notes) -> Callable[[], None]:
        """Install the probe, see `Probe.install`."""

        def before(_ddp: Any, module: nn.Module, *_args: Any, **named: Any) -> None:
            group = named.get("process_group") or dist.group.WORLD
            if group is None or not dist.is_initialized():
                return
            described = [
                [name, list(one.shape), str(one.dtype).removeprefix("torch."), one.requires_grad]
                for name, one in (*module.named_parameters(), *module.named_buffers())
            ]
            notes.write(
                "wrapping",
                group=describe_group(group),
                at=sequence_number(group),
                parameters=described[:_MAX_PARAMETERS],
                num_parameters=len(described),
                site=notes.site(),
            )

        ddp: Any = DistributedDataParallel
        return notes.around(ddp, "__init__", before=before)
