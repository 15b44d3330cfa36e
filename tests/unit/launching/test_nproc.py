# SPDX-License-Identifier: Apache-2.0
"""The number of ranks that `nproc_per_node` means on a machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddpilot.environments import nvml
from ddpilot.environments.nvml import NvmlDevices
from ddpilot.errors import LaunchError
from ddpilot.launching.nproc import resolve_nproc
from ddpilot.launching.rank_environment import count_cores

Set = Callable[[int], None]


@pytest.fixture
def have_gpus(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Sets the number of GPUs that the driver reports."""

    def set_to(num_gpus: int) -> None:
        devices = NvmlDevices(tuple(f"GPU-{number}" for number in range(num_gpus)))
        monkeypatch.setattr(nvml, "read_nvml", lambda: devices if num_gpus else None)

    return set_to


@pytest.mark.parametrize(
    ("asked", "num_gpus", "visible", "found", "note"),
    [
        ("auto", 4, None, 4, ""),
        ("auto", 4, "1,3", 2, ""),
        ("auto", 0, None, 1, "no GPU found, so one rank runs on the CPU; `nproc_per_node=2` starts two ("),
        ("gpu", 2, None, 2, ""),
        ("cpu", 0, None, count_cores(), ""),
        ("cpu", 2, None, count_cores(), ""),
        (3, 0, None, 3, ""),
        (2, 2, None, 2, ""),
        (3, 2, None, 3, "3 ranks on 2 GPUs: `init_group()` uses gloo, since NCCL refuses two ranks on one GPU"),
    ],
)
def test_resolve_nproc_follows_the_visible_gpus(
    asked: int | str, num_gpus: int, visible: str | None, found: int, note: str, have_gpus: Set
) -> None:
    """A word becomes a number; a number that may be unexpected is explained."""
    have_gpus(num_gpus)
    notes: list[str] = []
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert resolve_nproc(asked, environ, notes.append) == found
    assert [each[: len(note)] for each in notes] == ([note] if note else [])


def test_resolve_nproc_refuses_gpu_if_none_is_visible(have_gpus: Set) -> None:
    """The error names the variable that hides them, and the option as it was given."""
    have_gpus(0)
    with pytest.raises(LaunchError, match=r'`nproc_per_node="gpu"`: no GPU is visible\. Check `nvidia-smi` and'):
        resolve_nproc("gpu", {}, print)
    have_gpus(2)
    with pytest.raises(LaunchError, match=r"-n gpu: no GPU is visible \(CUDA_VISIBLE_DEVICES=''\).* -n 2 or -n cpu"):
        resolve_nproc("gpu", {"CUDA_VISIBLE_DEVICES": ""}, print, write="-n {}".format)


def test_resolve_nproc_refuses_nccl_if_ranks_share_a_gpu(have_gpus: Set) -> None:
    """NCCL would fail later, with a less useful message."""
    have_gpus(2)
    with pytest.raises(LaunchError, match=r"NCCL refuses two ranks on one GPU\. Use `nproc_per_node=2`, or `backend="):
        resolve_nproc(3, {}, print, backend="cpu:gloo,cuda:nccl")
