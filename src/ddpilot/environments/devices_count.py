# SPDX-License-Identifier: Apache-2.0
"""Count the NVIDIA devices visible to a process, without torch and without initializing CUDA.

The launching parent needs this before it starts ranks. Initializing CUDA there (as `torch.cuda.is_available()` does)
would make the GPU unusable in every process forked later. The driver's management library (NVML) does not need it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ddpilot.environments.nvml import NvmlDevices, read_nvml


def count_accelerators(environ: Mapping[str, str]) -> int:
    """Number of NVIDIA devices visible to a process started with `environ`; 0 without a driver or NVML.

    Interprets CUDA_VISIBLE_DEVICES as the driver does: indices, GPU and MIG identifiers, "" and "-1" (none). If a
    visible device is in MIG mode, the process sees exactly one MIG instance. Not collective, does not import torch,
    does not create a CUDA context.
    """
    devices = read_nvml()
    return 0 if devices is None else visible_count(environ.get("CUDA_VISIBLE_DEVICES"), devices)


def visible_count(visible: str | None, devices: NvmlDevices) -> int:
    """Number of `devices` that `visible`, the value of CUDA_VISIBLE_DEVICES, leaves visible. None: not set."""
    if not devices.uuids:
        return 0
    if visible is None:
        return 1 if devices.split else len(devices.uuids)
    items = [item.strip() for item in visible.split(",")]
    if items[0].startswith("MIG-"):
        return 1 if devices.split else 0
    if items[0].startswith("GPU-"):
        indices = [_index_of_uuid(item, devices.uuids) for item in items]
    else:
        indices = [_leading_int(item) for item in items]
    seen: list[int] = []
    for index in indices:
        # The driver stops at the first invalid entry: all entries after it are ignored too.
        if index is None or not 0 <= index < len(devices.uuids):
            break
        if index in seen:
            return 0
        seen.append(index)
    return 1 if devices.split.intersection(seen) else len(seen)


def _leading_int(text: str) -> int | None:
    match = re.match(r"[+-]?\d+", text)
    return int(match.group()) if match else None


def _index_of_uuid(prefix: str, uuids: tuple[str, ...]) -> int | None:
    found = [index for index, uuid in enumerate(uuids) if uuid.startswith(prefix)]
    return found[0] if len(found) == 1 and prefix.startswith("GPU-") else None
