# SPDX-License-Identifier: Apache-2.0
"""An emulated accelerator, `emu`: what a program that was written for one meets, without one.

A process whose environment has `environment()` finds, after `import torch`, what a machine with GPUs shows it:
`torch.accelerator.current_accelerator()` is `emu`, `torch.emu` is the module that `torch.cuda` would be, and
torch.distributed has the backend `eccl` for it (csrc/collectives.cpp). Without that environment nothing changes.

What is as on CUDA:

- An operation returns at once; a thread per stream runs it. Events order streams. What makes the host wait is counted
  by kind in `torch.emu.host_syncs()`: synchronize, a stream's and an event's synchronize, item, blocking copies, and
  operations whose output's shape depends on values (nonzero, unique, a mask as index).
- backward runs in the autograd engine's own thread of the device.
- Memory is counted when tensors come and go, has a limit (`set_memory_limit`), and is freed in the order of its stream:
  what another stream still reads without record_stream is overwritten with 0xFF.
- Pinned memory is marked, and copies between it and the device may be non-blocking; copies from and to other host
  memory are staged or waited for.
- Random numbers come from the device's generator (a seed and an offset), which never waits.
- An error of a kernel (an index out of range) comes at a later call, `torch.AcceleratorError`, and stays.
- A process may fork before the first use of a device; after it, using one in the child is refused.
- EMU_VISIBLE_DEVICES masks and renumbers devices; their UUIDs stay. EMU_NUM_DEVICES is their number.
- float16 and bfloat16 autocast, and GradScaler("emu").

What is not:

- Speed, and memory of its own: the CPU's kernels run over host memory, with one thread per stream.
- Random numbers differ from CUDA's and from the CPU's of the same seed.
- An operation without a Meta kernel makes the host wait; on CUDA it may not. It is counted as data-dependent.
- Sparse, quantized and nested tensors, torch.compile, graphs, memory pools, sharing of tensors between processes.
- Freed memory goes back to the host when the work in flight is done: nothing is cached, `memory_reserved` only counts.
- DDP needs a named backend, such as "cpu:gloo,emu:eccl": `init_process_group()` without one takes `eccl`, but torch
  names gloo the group's default backend on every device other than CUDA.
- Ranks on different devices share nothing: no peer-to-peer access, no limit of what several processes use of a device.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.accelerator.build import library, why_not

__all__ = ["environment", "library", "masked_environment", "why_not"]

SITE = Path(__file__).parent / "site"
"""The folder that makes `import torch` load the device, as an installed accelerator package does."""


def environment(num_devices: int = 2) -> dict[str, str]:
    """Build the device where need be, and return the variables that give it to a process and its children."""
    path = [str(SITE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "EMU_LIBRARY": str(library()),
        "EMU_NUM_DEVICES": str(num_devices),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
    }


def masked_environment() -> dict[str, str]:
    """The variables of `environment`, with no device visible: ranks compute on the CPU, forked from the same server."""
    return {**environment(), "EMU_VISIBLE_DEVICES": ""}
