# SPDX-License-Identifier: Apache-2.0
"""The backend `eccl` of torch.distributed: what NCCL is for CUDA devices, for the device `emu`."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def create(options: Any, backend_options: Any) -> Any:
    """Make the backend of one process group, as torch makes that of an NCCL group."""
    compiled: Any = sys.modules["emu_C"]  # which the autoloading has loaded

    chosen = compiled.ProcessGroupECCL.Options() if backend_options is None else backend_options
    chosen._timeout = options.timeout
    chosen.global_ranks_in_group = options.global_ranks_in_group
    chosen.group_name = options.group_id
    if dist.is_initialized() and c10d._get_default_group().bound_device_id is not None:
        chosen.split_from = c10d._get_split_source(c10d._get_default_group())
    return compiled.ProcessGroupECCL(options.store, options.group_rank, options.group_size, chosen)


if torch.distributed.is_available():
    dist.Backend.register_backend("eccl", create, extended_api=True, devices=["emu"])
