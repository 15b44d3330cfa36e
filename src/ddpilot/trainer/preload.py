# SPDX-License-Identifier: Apache-2.0
"""Modules imported before ranks are forked, which each rank would else import in every fit (3 s, mostly Dynamo)."""

from __future__ import annotations

import torch._dynamo  # imported by every torch optimizer when it is created
from torch.nn.parallel import DistributedDataParallel

from ddpilot.trainer.trainer import Trainer

__all__ = ["DistributedDataParallel", "Trainer", "torch"]
