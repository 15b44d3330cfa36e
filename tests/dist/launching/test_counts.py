# SPDX-License-Identifier: Apache-2.0
"""How many ranks start, on real ranks; the refusals are in tests/unit."""

from __future__ import annotations

import os

import pytest

import ddpilot
from ddpilot import Launcher
from ddpilot.environments import nvml
from ddpilot.environments.nvml import NvmlDevices
from ddpilot.launching.rank_environment import count_cores


def place() -> tuple[str | None, str | None]:
    """The rank's number and the number of ranks."""
    return os.environ.get("LOCAL_RANK"), os.environ.get("WORLD_SIZE")


def test_launch_starts_one_rank_with_a_hint_when_there_is_no_accelerator(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """ "auto": visible accelerators, else 1 with a hint."""
    monkeypatch.setattr(nvml, "read_nvml", lambda: None)
    assert list(ddpilot.launch(place)) == [("0", "1")]
    assert "`nproc_per_node=2` starts two (" in capfd.readouterr().err


def test_launch_starts_one_rank_per_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that reports three devices gives three ranks, two where the environment hides one."""
    monkeypatch.setattr(nvml, "read_nvml", lambda: NvmlDevices(("GPU-a", "GPU-b", "GPU-c")))
    assert list(ddpilot.launch(place)) == [(str(rank), "3") for rank in range(3)]
    assert len(Launcher(nproc_per_node="gpu", env={"CUDA_VISIBLE_DEVICES": "2,0"}).run(place)) == 2


def test_launch_starts_one_rank_per_core_when_asked() -> None:
    """ "cpu" counts cores."""
    assert len(Launcher(nproc_per_node="cpu").run(place)) == count_cores()


def test_launch_starts_more_ranks_than_gpus_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """ "More ranks than GPUs": they share them over gloo, with a notice."""
    monkeypatch.setattr(nvml, "read_nvml", lambda: NvmlDevices(("GPU-a",)))
    assert len(Launcher(nproc_per_node=2).run(place)) == 2
    assert "2 ranks on 1 GPU: `init_group()` uses gloo" in capfd.readouterr().err
