# SPDX-License-Identifier: Apache-2.0
"""Shared helpers of the checks: the accelerator of this machine, ranks on it, and work that keeps it busy."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ddpilot.gpu_check.catalogue import CannotBeShownError
from ddpilot.group.init_group import init_group
from ddpilot.launcher import Launcher
from ddpilot.launching.shipping.pickling import RankResults
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.hook import RING_DIR_VARIABLE, ring_path

_MAX_CYCLES_PER_S = 2.0e9
"""Upper bound of a GPU's clock rate: this many cycles take at least one second."""
LAUNCH_LIMIT_S = 70.0
_COPY = "gpu_check_programs"


def accelerator_kind() -> str:
    """Return the accelerator's type, such as "cuda"; "cpu" if there is no device. Creates no CUDA context."""
    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 built for CUDA, without a device
        return "cpu"
    if found is None or torch.get_device_module(found.type).device_count() == 0:
        return "cpu"
    return str(found.type)


def count_devices() -> int:
    """Return the number of accelerators that this process sees."""
    kind = accelerator_kind()
    return 0 if kind == "cpu" else int(torch.get_device_module(kind).device_count())


def first_device() -> torch.device:
    """Return device 0 of the accelerator, or the CPU."""
    kind = accelerator_kind()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, 0)


def wait_for(device: torch.device) -> None:
    """Wait until all work queued on `device` has finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def backend_of(device: torch.device) -> str:
    """Return the name of the backend that the default group uses for tensors on `device`."""
    pairs = [part.rpartition(":") for part in str(dist.get_backend_config()).split(",")]
    return next(backend for kind, _, backend in pairs if kind in (device.type, ""))


def join_pair() -> torch.device:
    """Join a group of two ranks on the accelerator's own backend and return this rank's device. Collective.

    On a single NVIDIA device, the ranks join NCCL as two hosts that communicate over loopback, as NCCL rejects two
    ranks of one host on one device.
    """
    rank = int(os.environ["RANK"])
    if accelerator_kind() != "cuda" or count_devices() >= int(os.environ["WORLD_SIZE"]):
        return init_group().device
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # see ddpilot.group.creation
    os.environ["NCCL_HOSTID"] = f"gpu-check-{rank}"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def run_ranks(fn: Callable[..., Any], *args: Any, num_ranks: int = 2, **options: Any) -> RankResults:
    """Return what `fn` returns on each of `num_ranks` ranks; `options` are those of `Launcher`."""
    options.setdefault("timeout_s", LAUNCH_LIMIT_S)
    return Launcher(nproc_per_node=num_ranks, **options).run(fn, *args)


def read_own_ring() -> RankLog:
    """Return this rank's log, read from its own ring."""
    return read_ring(ring_path(os.environ[RING_DIR_VARIABLE], int(os.environ["RANK"])))


def import_copy(folder: str) -> ModuleType:
    """Import a copy of the module `programs` from the temporary `folder`, so that its lines count as the user's."""
    (Path(folder) / f"{_COPY}.py").write_text((Path(__file__).parent / "programs.py").read_text())
    sys.path.insert(0, folder)
    return importlib.import_module(_COPY)


def keep_busy(device: torch.device, at_least_s: float) -> None:
    """Queue work on `device` that takes at least `at_least_s` seconds, without waiting. Does nothing on the CPU."""
    if device.type == "cuda" and torch.version.cuda is not None:
        torch.cuda._sleep(int(at_least_s * _MAX_CYCLES_PER_S))  # type: ignore[no-untyped-call]
    elif device.type != "cpu":
        values = torch.eye(512, device=device)
        took_s = [_seconds_of_products(values, 4) for _ in range(3)]
        _queue_products(values, int(4 * at_least_s / min(took_s)) + 1)


def _seconds_of_products(values: torch.Tensor, num: int) -> float:
    begin = time.perf_counter()
    _queue_products(values, num)
    wait_for(values.device)
    return time.perf_counter() - begin


def _queue_products(values: torch.Tensor, num: int) -> None:
    for _ in range(num):
        values = values @ values


def wait_for_file(path: Path, limit_s: float) -> bool:
    """Wait until `path` exists. Returns False after `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def require_function(module: Any, name: str, what: str) -> Any:
    """Return `module.name`. Raises CannotBeShownError if it does not exist."""
    found = getattr(module, name, None)
    if found is None:
        raise CannotBeShownError(f"{module.__name__} has no {name}(), {what}")
    return found
