# SPDX-License-Identifier: Apache-2.0
"""Imported before the ranks are forked: what every fit would else wait for, on every rank (3 s, most of it Dynamo)."""

from __future__ import annotations

import torch._dynamo  # every optimizer of torch's asks for it when it is made
from torch.nn.parallel import DistributedDataParallel

from ddpilot.trainer.trainer import Trainer

__all__ = ["DistributedDataParallel", "Trainer", "torch"]
