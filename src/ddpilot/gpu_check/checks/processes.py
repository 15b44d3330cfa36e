# SPDX-License-Identifier: Apache-2.0
"""Check CUDA contexts in parent, rank server and import, launches after device use, and release of memory."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist

from ddpilot.environments.nvml import count_accelerators, read_gpus
from ddpilot.errors import RankError
from ddpilot.gpu_check.catalogue import Outcome, judge
from ddpilot.gpu_check.checks.accelerator import (
    accelerator_kind,
    count_devices,
    first_device,
    require_function,
    run_ranks,
    wait_for,
)
from ddpilot.group.init_group import init_group
from ddpilot.launching.rank_server.fork_safety import count_threads, cuda_driver_in_use

_HELD_BYTES = 2_000_000_000
_RETURNED_WITHIN_S = 2.0


def no_context_at_import() -> Outcome:
    """Importing ddpilot and torch and counting devices does not initialize the driver."""
    count, num_read = count_accelerators(os.environ), len(read_gpus())
    touched = cuda_driver_in_use()
    counted = torch.cuda.device_count()
    evidence = f"ddpilot counts {count}, torch {counted}; NVML describes {num_read}; driver initialised: {touched}"
    return judge(count == counted and not touched, evidence)


def fork_after_imports() -> Outcome:
    """The rank server's imports neither initialize the driver nor start threads, so its forks can use the device."""
    before = count_threads()
    import torch._dynamo

    touched, more = cuda_driver_in_use(), count_threads() - before
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            status = 0 if torch.ones(3, device="cuda").sum().item() == 3 else 2
        except RuntimeError:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    evidence = f"driver initialised: {touched}, new threads: {more}, exit status of a fork that uses CUDA: {status}"
    return judge(not touched and more == 0 and status == 0, evidence)


def no_context_in_parent_or_server() -> Outcome:
    """A launch initializes the CUDA driver in its ranks only."""
    began = time.perf_counter()
    ((before, total),) = run_ranks(_use_device, num_ranks=1)
    took_s = time.perf_counter() - began
    parent = cuda_driver_in_use()
    is_initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    evidence = (
        f"driver initialised in the rank before its first use: {before}, in the parent after the launch: {parent}; "
        f"sum on the device {total}; first launch {took_s:.1f} s"
    )
    return judge(not before and not parent and not is_initialized and total == 3, evidence)


def _use_device() -> tuple[bool, float]:
    before = cuda_driver_in_use()
    return before, float(torch.ones(3, device="cuda").sum())


def launch_after_device_use() -> Outcome:
    """Ranks start and reduce after the parent ran a matmul and a backward; their tensors are returned on the CPU."""
    weight = torch.ones(500, 500, device=first_device(), requires_grad=True)
    (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]
    wait_for(weight.device)
    num_ranks = max(1, min(2, count_devices()))
    values = run_ranks(_reduce_once, num_ranks=num_ranks)
    wanted = num_ranks * (num_ranks + 1) / 2
    evidence = "; ".join(f"{device} over {backend}: {total[0].item()}" for total, device, backend in values)
    is_right = all(total.device.type == "cpu" and total.eq(wanted).all() for total, _, _ in values)
    are_apart = len({device for _, device, _ in values}) == num_ranks or accelerator_kind() == "cpu"
    return judge(bool(is_right) and are_apart, f"{num_ranks} ranks: {evidence}; wanted {wanted}")


def _reduce_once() -> tuple[torch.Tensor, str, str]:
    group = init_group()
    total = torch.full((4,), group.rank + 1.0, device=group.device)
    dist.all_reduce(total)
    return total, str(group.device), group.backend


def memory_is_returned() -> Outcome:
    """Memory of a failed rank is free on the device two seconds after the error."""
    device = first_device()
    free_bytes = require_function(
        torch.get_device_module(device), "mem_get_info", "which counts the memory of all processes"
    )
    before = free_bytes(device)[0]
    error = ""
    try:
        run_ranks(_hold_and_fail, num_ranks=1)
    except RankError as caught:
        error = type(caught).__name__
    began = time.monotonic()
    while free_bytes(device)[0] < before - _HELD_BYTES // 10 and time.monotonic() - began < 20:
        time.sleep(0.05)
    took_s, missing = time.monotonic() - began, before - free_bytes(device)[0]
    evidence = f"{error or 'no error'}; {took_s:.2f} s after it {missing / 1e6:.0f} MB less are free than before"
    return judge(bool(error) and took_s < _RETURNED_WITHIN_S, evidence)


def _hold_and_fail() -> None:
    held = torch.ones(_HELD_BYTES // 4, device=first_device())
    wait_for(held.device)
    raise ValueError(f"holding {held.nbytes} bytes")


def preloaded_module_is_named() -> Outcome:
    """If a preloaded module initializes CUDA on import, ranks start as fresh interpreters and can use the device."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "touches_cuda.py"), "w") as file:
            file.write("import torch\ntorch.ones(1, device='cuda')\n")
        sys.path.insert(0, folder)
        try:
            ((_, total),) = run_ranks(_use_device, num_ranks=1, preload=("touches_cuda",))
        finally:
            sys.path.remove(folder)
    return judge(total == 3, f"sum on the device {total} in a rank that was started as a fresh interpreter")
