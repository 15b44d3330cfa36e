# SPDX-License-Identifier: Apache-2.0
"""Check that devices are counted as the driver counts them, and have distinct identities."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ddpilot.environments.nvml import NvmlDevices, count_accelerators, find_devices, open_nvml, read_nvml
from ddpilot.gpu_check.catalogue import CannotBeShownError, Outcome, judge
from ddpilot.gpu_check.checks.accelerator import accelerator_kind, count_devices, run_ranks
from ddpilot.group.device import device_identity
from ddpilot.group.init_group import init_group

# Calls the driver instead of torch, to take only 0.1 s per mask. `cuInit` returns 100 if there is no device.
_COUNT = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
print(0 if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 else count.value)
"""
_UUID_BYTES = 96


def devices_by_uuid() -> Outcome:
    """Every device has its own identity, and NVML knows the UUID of each device that torch sees."""
    kind = accelerator_kind()
    identities = [device_identity(torch.device(kind, index)) for index in range(count_devices())]
    are_distinct = len(set(identities)) == len(identities)
    if kind != "cuda" or torch.version.cuda is None:
        return judge(are_distinct, f"{len(identities)} devices of type {kind}, all distinct: {are_distinct}")
    nvml = _require_nvml()
    found = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count_devices())]
    known = {uuid.removeprefix("GPU-") for uuid in nvml.uuids}
    unknown = [uuid for uuid in found if uuid.removeprefix("GPU-") not in known]
    evidence = (
        f"{len(found)} devices, {len(nvml.uuids)} in NVML, split by MIG: {len(nvml.split)}; all distinct: "
        f"{are_distinct}; {len(unknown)} of torch's UUIDs unknown to NVML"
    )
    return judge(are_distinct and bool(all(identities)) and (bool(nvml.split) or not unknown), evidence)


def masked_devices() -> Outcome:
    """For each kind of CUDA_VISIBLE_DEVICES, ddpilot counts as many devices as the driver."""
    nvml = _require_nvml()
    first = nvml.uuids[0]
    masks = ["", "-1", "0", "0,0", "0,99", "99", "0,-1", " 0", first, first[:12], f"{first},{first}", "GPU-none"]
    if len(nvml.uuids) > 1:
        masks += ["1", "1,0", "0,1,0", ",".join(nvml.uuids[:2]), "0,-1,1", f"{first},1"]
    wrong = []
    for mask in (None, *masks):
        environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        environ |= {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
        counted, ours = int(_run_python(_COUNT, environ)), count_accelerators(environ)
        if counted != ours:
            wrong.append(f"{mask!r}: driver {counted}, ddpilot {ours}")
    evidence = f"{1 + len(masks)} masks on {len(nvml.uuids)} devices; different: {'; '.join(wrong) or 'none'}"
    return judge(not wrong, evidence.replace(first, "GPU-(first)").replace(first[:12], "GPU-(prefix)"))


def _run_python(source: str, environ: Mapping[str, str]) -> str:
    command = [sys.executable, "-c", source]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True).stdout


def mig_slices() -> Outcome:
    """A process sees one MIG slice, and ranks on two slices of a GPU have the same device identity."""
    nvml = _require_nvml()
    if not nvml.split:
        raise CannotBeShownError("no device is in MIG mode")
    slices = _read_mig_uuids()
    if not slices:
        raise CannotBeShownError("a device is in MIG mode, but no slice of it can be seen")
    counted = count_accelerators({**os.environ, "CUDA_VISIBLE_DEVICES": slices[0]})
    source = (
        "import torch\nfrom ddpilot.group.device import device_identity\n"
        "print(torch.cuda.device_count(), device_identity(torch.device('cuda', 0)), sep='|')"
    )
    seen = []
    for uuid in slices[:2]:
        seen.append(_run_python(source, {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}).strip().split("|"))
    are_shared = len(seen) < 2 or seen[0][1] == seen[1][1]
    evidence = f"{len(slices)} slices; ddpilot counts {counted}; torch's count and identity: {seen}"
    return judge(counted == 1 and all(count == "1" for count, _ in seen) and are_shared, evidence)


def ranks_on_one_device() -> Outcome:
    """Two ranks that see the same device share it over gloo, reduce correctly, and warn about it."""
    is_cuda = accelerator_kind() == "cuda"
    if not is_cuda and count_devices() > 1:
        raise CannotBeShownError("only CUDA_VISIBLE_DEVICES is known to hide a device")
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    values = run_ranks(_share_device, env={"CUDA_VISIBLE_DEVICES": first} if is_cuda else {})
    evidence = "; ".join(f"{device} over {backend}: {total}" for total, device, backend, _ in values)
    is_right = all(total == 3 and backend == "gloo" for total, _, backend, _ in values)
    has_warned = any("share" in text for *_, texts in values for text in texts)
    return judge(is_right and has_warned, f"{evidence}; the ranks warn: {has_warned}")


def _share_device() -> tuple[float, str, str, list[str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        group = init_group()
    total = torch.full((4,), group.rank + 1.0, device=group.device)
    dist.all_reduce(total)
    return total[0].item(), str(group.device), group.backend, [str(each.message) for each in seen]


def _require_nvml() -> NvmlDevices:
    nvml = read_nvml()
    if nvml is None or not nvml.uuids:
        raise CannotBeShownError("NVML (libnvidia-ml.so.1) does not answer here")
    return nvml


def _read_mig_uuids() -> list[str]:
    found = []
    with open_nvml() as nvml:
        devices = None if nvml is None else find_devices(nvml)
        for _, device in devices or ():
            num = ctypes.c_uint(0)
            if nvml.nvmlDeviceGetMaxMigDeviceCount(device, ctypes.byref(num)) != 0:
                continue
            for number in range(num.value):
                mig, text = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
                has_slice = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, number, ctypes.byref(mig)) == 0
                if has_slice and nvml.nvmlDeviceGetUUID(mig, text, ctypes.c_uint(_UUID_BYTES)) == 0:
                    found.append(text.value.decode("ascii", "replace"))
    return found
