# SPDX-License-Identifier: Apache-2.0
"""Resolve a number of ranks, or a word such as "gpu", to the number of ranks on this node."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddpilot.environments.devices_count import count_accelerators
from ddpilot.errors import LaunchError
from ddpilot.launching.rank_environment import count_cores


def count_ranks(asked: int | str, environ: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Number of ranks that `asked` (a number, "auto", "gpu" or "cpu") means on this node. `say` shows a notice.

    Raises LaunchError for "gpu" if no GPU is visible.
    """
    if asked == "cpu":
        return count_cores()
    num_gpus = count_accelerators(environ)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if asked == "gpu" and num_gpus == 0:
        seen = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        fix = "Check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or give a number of ranks or cpu"
        raise LaunchError("counting ranks for -n gpu", found=f"no GPU is visible{seen}", fix=fix)
    if isinstance(asked, int):
        if 0 < num_gpus < asked:
            gpus = f"{num_gpus} GPU{'s' * (num_gpus > 1)}"
            say(
                f"{asked} ranks on {gpus}: `init_group()` lets them share, over gloo; NCCL refuses two ranks on one GPU"
            )
        return asked
    if num_gpus == 0:
        say(f"no GPU found, so one rank runs on the CPU; -n 2 gives two of them ({count_cores()} cores here)")
    return max(1, num_gpus)
