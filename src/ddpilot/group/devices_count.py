# SPDX-License-Identifier: Apache-2.0
"""Count the NVIDIA devices that a process may use, without torch and without touching CUDA.

The launching parent asks this before it starts ranks; initialising CUDA there (which `torch.cuda.is_available()` does)
would make every process forked later unable to use a GPU. The driver's management library (NVML) answers without.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

_UUID_BYTES = 96


@dataclass(frozen=True)
class NvmlDevices:
    """What NVML reports about this machine: `uuids` in NVML's order ("GPU-..."), `mig`: is any device split by MIG."""

    uuids: tuple[str, ...]
    mig: bool = False


def count_accelerators(environ: Mapping[str, str]) -> int:
    """How many NVIDIA devices a process started with `environ` would see; 0 without a driver or without NVML.

    Honours CUDA_VISIBLE_DEVICES as the driver does: numbers, GPU and MIG identifiers, "" and "-1" (none). A process
    sees one MIG instance at most. Not collective, loads no torch, creates no CUDA context.
    """
    devices = read_nvml()
    return 0 if devices is None else visible_count(environ.get("CUDA_VISIBLE_DEVICES"), devices)


def visible_count(visible: str | None, devices: NvmlDevices) -> int:
    """How many of `devices` are left by `visible`, the text of CUDA_VISIBLE_DEVICES (None: not set)."""
    if not devices.uuids:
        return 0
    if visible is None:
        return 1 if devices.mig else len(devices.uuids)
    items = [item.strip() for item in visible.split(",")]
    if items[0].startswith("MIG-"):
        return 1 if devices.mig else 0
    if items[0].startswith("GPU-"):
        indices = [_index_of_uuid(item, devices.uuids) for item in items]
    else:
        indices = [_leading_int(item) for item in items]
    seen: list[int] = []
    for index in indices:
        # The driver stops at the first entry that names no device: what follows it is hidden too.
        if index is None or not 0 <= index < len(devices.uuids):
            break
        if index in seen:
            return 0
        seen.append(index)
    return min(len(seen), 1) if devices.mig else len(seen)


def _leading_int(text: str) -> int | None:
    match = re.match(r"[+-]?\d+", text)
    return int(match.group()) if match else None


def _index_of_uuid(prefix: str, uuids: tuple[str, ...]) -> int | None:
    found = [index for index, uuid in enumerate(uuids) if uuid.startswith(prefix)]
    return found[0] if len(found) == 1 and prefix.startswith("GPU-") else None


def read_nvml() -> NvmlDevices | None:
    """The machine's NVIDIA devices as NVML reports them; None where there is no NVML or it does not answer."""
    name = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
    try:
        nvml = ctypes.CDLL(name)
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        return _read_devices(nvml)
    finally:
        nvml.nvmlShutdown()


def _read_devices(nvml: ctypes.CDLL) -> NvmlDevices | None:
    count = ctypes.c_uint(0)
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return None
    uuids: list[str] = []
    mig = False
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
            continue
        text = ctypes.create_string_buffer(_UUID_BYTES)
        named = nvml.nvmlDeviceGetUUID(handle, text, ctypes.c_uint(_UUID_BYTES)) == 0
        uuids.append(text.value.decode("ascii", "replace") if named else f"unnamed-{index}")
        current, pending = ctypes.c_uint(0), ctypes.c_uint(0)
        asked = nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(current), ctypes.byref(pending))
        mig = mig or (asked == 0 and current.value == 1)
    return NvmlDevices(tuple(uuids), mig)
