# SPDX-License-Identifier: Apache-2.0
"""Count the NVIDIA devices that a process may use, without torch and without touching CUDA.

The launching parent asks this before it starts ranks; initialising CUDA there (which `torch.cuda.is_available()` does)
would make every process forked later unable to use a GPU. The driver's management library (NVML) answers without.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

_UUID_BYTES = 96


@dataclass(frozen=True)
class NvmlDevices:
    """What NVML reports about this machine: `uuids` in NVML's order ("GPU-..."), `split`: positions split by MIG."""

    uuids: tuple[str, ...]
    split: frozenset[int] = frozenset()


def count_accelerators(environ: Mapping[str, str]) -> int:
    """How many NVIDIA devices a process started with `environ` would see; 0 without a driver or without NVML.

    Honours CUDA_VISIBLE_DEVICES as the driver does: numbers, GPU and MIG identifiers, "" and "-1" (none). A process
    to which a device is visible that is split by MIG sees one instance of it, and nothing else. Not collective, loads
    no torch, creates no CUDA context.
    """
    devices = read_nvml()
    return 0 if devices is None else visible_count(environ.get("CUDA_VISIBLE_DEVICES"), devices)


def visible_count(visible: str | None, devices: NvmlDevices) -> int:
    """How many of `devices` are left by `visible`, the text of CUDA_VISIBLE_DEVICES (None: not set)."""
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
        # The driver stops at the first entry that names no device: what follows it is hidden too.
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


def read_nvml() -> NvmlDevices | None:
    """The machine's NVIDIA devices as NVML reports them; None where there is no NVML or it does not answer."""
    with _open_nvml() as nvml:
        return None if nvml is None else _read_devices(nvml)


def find_pci_place(uuid: str) -> str:
    """The place on the PCI bus of the device with `uuid` ("GPU-" may be missing): "00000000:3b:00"; "" if unknown.

    Of a MIG instance the place of its GPU. Creates no CUDA context.
    """
    with _open_nvml() as nvml:
        if nvml is None or not uuid:
            return ""
        for name in (uuid, f"GPU-{uuid}", f"MIG-{uuid}"):
            handle, info = ctypes.c_void_p(), _PciInfo()
            if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != 0:
                continue
            parent = ctypes.c_void_p()
            if nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle, ctypes.byref(parent)) == 0:
                handle = parent
            if nvml.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(info)) == 0:
                return f"{info.domain:08x}:{info.bus:02x}:{info.device:02x}"
    return ""


class _PciInfo(ctypes.Structure):
    """`nvmlPciInfo_t` of nvml.h."""

    _fields_ = [
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    ]


@contextmanager
def _open_nvml() -> Iterator[ctypes.CDLL | None]:
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _read_devices(nvml: ctypes.CDLL) -> NvmlDevices | None:
    count = ctypes.c_uint(0)
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return None
    uuids: list[str] = []
    split: set[int] = set()
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
            continue
        current, pending = ctypes.c_uint(0), ctypes.c_uint(0)
        asked = nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(current), ctypes.byref(pending))
        if asked == 0 and current.value == 1:
            split.add(len(uuids))
        text = ctypes.create_string_buffer(_UUID_BYTES)
        named = nvml.nvmlDeviceGetUUID(handle, text, ctypes.c_uint(_UUID_BYTES)) == 0
        uuids.append(text.value.decode("ascii", "replace") if named else f"unnamed-{index}")
    return NvmlDevices(tuple(uuids), frozenset(split))
