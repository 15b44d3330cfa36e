# SPDX-License-Identifier: Apache-2.0
""" "Nothing stale": every launch has the parent's present environment, directory and path, and fresh random states."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpilot import Launcher
from ddpilot.launching.rank_environment import count_cores


def state() -> dict[str, Any]:
    """Where a rank is, and what is random in it."""
    import random

    import numpy as np
    import torch

    return {
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "path": list(sys.path),
        "argv": list(sys.argv),
        "random": (random.random(), float(np.random.rand()), float(torch.rand(()))),
        "threads": torch.get_num_threads(),
    }


def test_launch_ships_environment_directory_path_and_arguments_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "Every launch ships environment, working directory and `sys.path`": what changed in between is seen."""
    launcher = Launcher(nproc_per_node=1, env={"MINE": "of the launcher", "BOTH": "of the launcher"})
    monkeypatch.setenv("BOTH", "of the parent")
    monkeypatch.setenv("GONE", "soon")
    before = launcher.run(state)[0]
    assert before["cwd"] == os.getcwd()
    assert before["environ"]["GONE"] == "soon"

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("NEW", "ä\nb=c")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    after = launcher.run(state)[0]
    assert (after["cwd"], after["path"], after["argv"]) == (str(tmp_path), sys.path, ["train.py", "--lr", "0.1"])
    assert "GONE" not in after["environ"]
    assert (after["environ"]["NEW"], after["environ"]["MINE"], after["environ"]["BOTH"]) == (
        "ä\nb=c",
        "of the launcher",
        "of the launcher",
    )
    assert {**os.environ, **after["environ"]} == after["environ"] | {"BOTH": "of the launcher"}


def test_launch_applies_variables_that_libraries_keep_from_their_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed temporary folder, time zone, and switches of torch take effect, as in a fresh interpreter."""

    def applied() -> tuple[str, str, bool, bool]:
        import tempfile
        import time

        import torch._dynamo.config
        import torch.jit._state

        return (
            tempfile.gettempdir(),
            time.tzname[0],
            torch.jit._state._enabled.enabled,
            torch._dynamo.config.suppress_errors,
        )

    launcher = Launcher(nproc_per_node=1, output="silent")
    assert launcher.run(applied)[0][2:] == (True, False)
    changed = {"TMPDIR": str(tmp_path), "TZ": "XYZ-5", "PYTORCH_JIT": "0", "TORCHDYNAMO_SUPPRESS_ERRORS": "1"}
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    assert launcher.run(applied)[0] == (str(tmp_path), "XYZ", False, True)


def test_launch_seeds_every_rank_afresh() -> None:
    """ "Every rank reseeds torch and numpy from fresh entropy": no two ranks, and no two launches, draw the same."""
    launcher = Launcher(nproc_per_node=2)
    drawn = [one["random"] for _ in range(2) for one in launcher.run(state)]
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 4


def test_launch_shares_the_cores_and_follows_omp_num_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "Threads = cores / ranks unless set", also when OMP_NUM_THREADS changes after torch was imported."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [one["threads"] for one in Launcher(nproc_per_node=1).run(state)] == [count_cores()]
    assert [one["threads"] for one in Launcher(nproc_per_node=2).run(state)] == [max(1, count_cores() // 2)] * 2
    assert Launcher(nproc_per_node=1, env={"OMP_NUM_THREADS": "3"}).run(state)[0]["threads"] == 3


def test_launch_sees_a_module_that_was_edited_between_two_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks import the text that is on the disk now, a module that did not exist before included."""

    def version() -> Any:
        import importlib

        return importlib.import_module("edited").VERSION

    monkeypatch.syspath_prepend(str(tmp_path))
    launcher = Launcher(nproc_per_node=1)
    for number in (1, 22):
        (tmp_path / "edited.py").write_text(f"VERSION = {number}\n")
        assert list(launcher.run(version)) == [number]
