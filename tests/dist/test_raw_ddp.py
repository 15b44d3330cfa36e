# SPDX-License-Identifier: Apache-2.0
"""examples/raw_ddp.py is one file for every way to start ranks, and learns the same in each."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpilot
from examples import raw_ddp
from tests.dist.launching.scripts import Outcome, finish, started
from tests.preload import PRELOAD
from tests.soak import soak

SCRIPT = Path(raw_ddp.__file__)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def train_in_float64(*args: Any) -> dict[str, Any]:
    """The script's `train` with double precision, where only the order of summation is left to differ."""
    torch.set_default_dtype(torch.float64)
    return raw_ddp.train(*args)


def launch(num_ranks: int, fn: Any, *args: Any) -> Any:
    """What every rank returned."""
    return ddpilot.Launcher(nproc_per_node=num_ranks, timeout_s=60, preload=PRELOAD).run(fn, *args)


def run(folder: Path, *words: object, **environment: str) -> Outcome:
    """Run a command in `folder` to its end, at most 80 seconds."""
    with started(words, folder, {**os.environ, **environment}) as process:
        return finish(process)


def losses_said(text: str) -> list[float]:
    """The losses that the script printed."""
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]


@pytest.fixture(scope="module")
def two_ranks() -> Any:
    """What 2 launched ranks return after an epoch in single precision."""
    return launch(2, raw_ddp.train, 1)


@pytest.mark.timeout(120)
@soak
def test_raw_ddp_learns_the_same_at_any_world_size_when_nothing_depends_on_the_rank() -> None:
    """Without batch norm: loss curve, test accuracy and weights agree to 1e-10 in float64 at 1, 2 and 4 ranks."""
    alone, *others = (launch(num_ranks, train_in_float64, 2) for num_ranks in (1, 2, 4))
    for results in others:
        for learnt in results:
            assert learnt["losses"] == pytest.approx(alone[0]["losses"], rel=1e-10)
            assert learnt["accuracy"] == alone[0]["accuracy"]
            for name, weight in alone[0]["weights"].items():
                torch.testing.assert_close(learnt["weights"][name], weight, rtol=0, atol=1e-10)


@pytest.mark.timeout(120)
@soak
def test_raw_ddp_depends_on_the_world_size_when_each_rank_keeps_its_own_batch_statistics() -> None:
    """With batch norm the curves differ, which also shows that the comparison above can fail."""
    one, two = (launch(num_ranks, train_in_float64, 1, 0.1, 64, "batch")[0]["losses"] for num_ranks in (1, 2))
    assert abs(one[0] - two[0]) > 1e-6


@pytest.mark.timeout(120)
def test_raw_ddp_under_torchrun_ends_with_the_weights_of_a_launch(tmp_path: Path, two_ranks: Any) -> None:
    """2 ranks of torchrun and 2 of ours: the same weights, read from the checkpoint that rank 0 wrote."""
    done = run(
        tmp_path, *TORCHRUN, "--standalone", "--nproc-per-node", 2, "--log-dir", tmp_path / "logs",
        SCRIPT, "--epochs", 1, "--checkpoint", tmp_path / "last.pt",
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert losses_said(done.out) == pytest.approx(two_ranks[0]["losses"], abs=1e-4)
    saved = torch.load(tmp_path / "last.pt", weights_only=True)
    assert saved["epoch"] == 0
    for name, weight in two_ranks[0]["weights"].items():
        torch.testing.assert_close(saved["model"][name], weight, rtol=0, atol=1e-6)
    assert [path.name for path in tmp_path.glob("last*")] == ["last.pt"]


@pytest.mark.timeout(120)
@soak
def test_raw_ddp_alone_trains_like_two_ranks(tmp_path: Path, two_ranks: Any) -> None:
    """Plain `python raw_ddp.py` is one rank, and its curve is that of two, to single precision."""
    done = run(tmp_path, sys.executable, SCRIPT, "--epochs", 1, "--checkpoint", tmp_path / "last.pt")
    assert done.code == 0, done.err
    assert losses_said(done.out) == pytest.approx(two_ranks[0]["losses"], abs=1e-3)
    assert "1 rank(s) on cpu" in done.out
    assert done.err == ""


@pytest.mark.timeout(60)
def test_raw_ddp_says_what_to_use_when_sync_batch_norm_is_asked_for_on_a_cpu(tmp_path: Path) -> None:
    """No traceback from torch's depths: one sentence, and an exit status that a script can test."""
    done = run(tmp_path, sys.executable, SCRIPT, "--epochs", 1, "--norm", "sync", CUDA_VISIBLE_DEVICES="")
    assert done.code == 1
    assert "SyncBatchNorm needs GPUs, and this rank trains on cpu. Use --norm batch" in done.err
    assert "Traceback" not in done.err


def test_save_checkpoint_keeps_the_old_file_when_writing_fails(tmp_path: Path) -> None:
    """What cannot be written leaves the checkpoint before it as it was."""
    path = tmp_path / "last.pt"
    raw_ddp.save_checkpoint(path, {"epoch": 1})
    with pytest.raises(AttributeError, match="local object"):
        raw_ddp.save_checkpoint(path, {"epoch": lambda: 2})
    assert torch.load(path, weights_only=True) == {"epoch": 1}
