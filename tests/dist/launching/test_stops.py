# SPDX-License-Identifier: Apache-2.0
"""Signals of a scheduler to a script that launches: its ranks get them, and time to save."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.soak import often

SAVES = """
import torch, ddpilot
from torch.utils.data import TensorDataset

def train(folder):
    loop = ddpilot.Loop(checkpoint_dir=folder, progress=False)
    model = torch.nn.Linear(1, 1)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = loop.loader(TensorDataset(torch.ones(200, 1)), global_batch_size=2)
    for _ in loop.epochs(1_000_000):
        for (x,) in loop.batches(loader):
            with loop.accumulate(model):
                loop.backward(model(x).mean())
            loop.step(optimizer)
            if loop.num_updates == 20:
                loop.print("ready", flush=True)

ddpilot.launch(train, FOLDER, nproc_per_node=2)
"""
SLEEPS = """
import time, ddpilot

def sleep():
    print("ready", flush=True)
    time.sleep(60)

ddpilot.launch(sleep, nproc_per_node=1)
"""

SLOW_TO_LEAVE = """
import os, sys, time, ddpilot

def train():
    import signal
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    rank = int(os.environ["RANK"])
    try:
        open(f"up{rank}", "w").close()
        while not os.path.exists(f"up{1 - rank}"):
            time.sleep(0.01)
        print("ready", flush=True)
        time.sleep(60)
    finally:
        time.sleep(3 * rank)
        print("left", rank, flush=True)

ddpilot.launch(train, nproc_per_node=2)
"""


@contextmanager
def ready(folder: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    """The script `text`, once a rank of it is ready; killed at the end, where it still runs."""
    path = folder / "script.py"
    path.write_text(text)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, path], stdout=pipe, stderr=pipe, text=True, cwd=folder) as process:
        try:
            assert process.stdout is not None
            assert any("ready" in line for line in process.stdout), process.stderr and process.stderr.read()
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.timeout(120)
@often("to every process of the job")
@pytest.mark.parametrize("to_all", [False, True], ids=["to the script", "to every process of the job"])
def test_launch_passes_sigterm_on_and_ends_with_75_after_a_checkpoint(tmp_path: Path, to_all: bool) -> None:
    """The rank server and the store live on until the ranks have saved."""
    with ready(tmp_path, SAVES.replace("FOLDER", repr(str(tmp_path / "ckpt")))) as process:
        own = psutil.Process(process.pid)
        for each in [*own.children(recursive=True), own] if to_all else [own]:
            each.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "ddpilot: SIGTERM to ranks 0,1; they have 30 s" in err
    assert f"SIGTERM: the checkpoint in {tmp_path}/ckpt is written; leaving epoch" in err
    assert "Traceback" not in err


@pytest.mark.timeout(120)
def test_launch_ends_by_the_signal_when_its_ranks_save_nothing(tmp_path: Path) -> None:
    """As a script without ranks does."""
    with ready(tmp_path, SLEEPS) as process:
        process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGUSR1, err


@pytest.mark.timeout(60)
def test_launch_lets_each_rank_that_leaves_for_a_requeue_end_its_finally(tmp_path: Path) -> None:
    """Rank 1 takes 3 s longer than rank 0 to leave with 75."""
    with ready(tmp_path, SLOW_TO_LEAVE) as process:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=50)
    assert process.returncode == 75, err
    assert "left 1" in out
