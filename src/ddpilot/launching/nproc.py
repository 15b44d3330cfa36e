# SPDX-License-Identifier: Apache-2.0
"""Resolve `nproc_per_node` to a number of ranks on this machine, for `launch`, for sessions and for ``ddpilot run``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from ddpilot.environments.nvml import count_accelerators
from ddpilot.errors import LaunchError
from ddpilot.launching.rank_environment import count_cores


def _as_argument(value: int | str) -> str:
    return f"`nproc_per_node={json.dumps(value)}`"


def resolve_nproc(
    asked: int | str,
    environ: Mapping[str, str],
    note: Callable[[str], None],
    *,
    backend: str | None = None,
    write: Callable[[int | str], str] = _as_argument,
) -> int:
    """Number of ranks that `asked` means for ranks with `environ`. Shows a hint, by `note`, if that may be unexpected.

    `backend`: backend of the ranks' process group, None if it is chosen for the device; `write`: how the option is
    written where it was given. Raises LaunchError for "gpu" if no GPU is visible, and for ranks that would share a GPU
    over NCCL.
    """
    if asked == "cpu":
        return count_cores()
    num_gpus = count_accelerators(environ)
    if isinstance(asked, int):
        if 0 < num_gpus < asked:
            _check_sharing(asked, num_gpus, note, backend, write)
        return asked
    if asked == "gpu" and num_gpus == 0:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        raise LaunchError(
            f"counting ranks for {write('gpu')}",
            found=f"no GPU is visible{'' if visible is None else f' (CUDA_VISIBLE_DEVICES={visible!r})'}",
            fix=f"Check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use {write(2)} or {write('cpu')}",
        )
    if num_gpus == 0:
        note(f"no GPU found, so one rank runs on the CPU; {write(2)} starts two ({count_cores()} cores here)")
    return max(1, num_gpus)


def _check_sharing(
    asked: int, num_gpus: int, note: Callable[[str], None], backend: str | None, write: Callable[[int | str], str]
) -> None:
    found = f"{asked} ranks on {num_gpus} GPU{'s' * (num_gpus > 1)}"
    if backend is not None and "nccl" in backend:
        raise LaunchError(
            f'starting {asked} ranks with `backend="{backend}"`',
            found=f"{found}; NCCL refuses two ranks on one GPU",
            fix=f'Use {write(num_gpus)}, or `backend="gloo"` to share GPUs',
        )
    note(f"{found}: `init_group()` uses gloo, since NCCL refuses two ranks on one GPU")
