# SPDX-License-Identifier: Apache-2.0
"""A scheduler's signal to `ddpilot run`: ranks save, the status asks for a requeue, the same command resumes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.dist.launching.scripts import finish
from tests.dist.run.commands import RUN, run, started, wait_for_line, write
from tests.ports import kept_port

SCRIPT = """
import torch, ddpilot
from torch.utils.data import TensorDataset
loop = ddpilot.Loop(checkpoint_dir="ckpt", progress=False)
model = torch.nn.Linear(1, 1)
loader = loop.loader(TensorDataset(torch.ones(200, 1)), global_batch_size=2)
model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
is_new = not loop.resume()
num_epochs = 1_000 if is_new else loop.epoch + 1
for _ in loop.epochs(num_epochs):
    for (x,) in loop.batches(loader):
        with loop.accumulate(model):
            loop.backward(model(x).mean())
        loop.step(optimizer)
        if is_new and loop.num_updates == 20:
            print("ready", flush=True)
loop.print("done", loop.num_updates == 100 * num_epochs)
"""


LEAVE = """
import os, sys, time
try:
    sys.exit(75)
finally:
    time.sleep(float(sys.argv[int(os.environ["RANK"]) + 1]))
"""


@pytest.mark.timeout(120)
def test_run_ends_with_75_after_a_checkpoint_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """SIGUSR1, as Slurm sends it before the time is up; both ranks stop after the same update."""
    write(tmp_path, "train.py", SCRIPT)
    with started([*RUN, "-n", 2, "train.py"], tmp_path) as process:
        wait_for_line(process, "ready")
        process.send_signal(signal.SIGUSR1)
        done = finish(process, 30)
    assert done.code == 75, done.err
    assert "SIGUSR1: the checkpoint in ckpt is written; leaving epoch" in done.err
    assert done.notes()[-1].endswith("rank 0 called sys.exit with code 75; rank 1 called sys.exit with code 75")
    again = run(tmp_path, "-n", 2, "train.py")
    assert again.code == 0, again.err
    assert "done True" in again.out
    assert "ddpilot: resuming from ckpt/save-" in again.err


def test_run_ends_with_75_only_if_every_rank_left_with_it(tmp_path: Path) -> None:
    """Ranks that exit within --shutdown-timeout are awaited, as after a long `finally`; others are terminated."""
    write(tmp_path, "leave.py", LEAVE)
    together = run(tmp_path, "-n", 2, "leave.py", 0, 5.5)
    assert together.code == 75
    assert "every rank of `leave.py` exited with code 75: run the same command again to resume" in together.err
    alone = run(tmp_path, "-n", 2, "--shutdown-timeout", 1, "leave.py", 0, 60)
    assert alone.code == 1
    assert "rank 0 exited with code 75 (EX_TEMPFAIL), which asks for a restart" in alone.err


def test_run_ends_with_75_on_each_node_whose_ranks_left_with_it(tmp_path: Path) -> None:
    """Node 0's rank has left while node 1's still runs its `finally`: node 1 gives it the time, and ends with 75."""
    write(tmp_path, "leave.py", LEAVE)
    words = ("--nnodes", 2, "-n", 1, "--master-addr", "127.0.0.1", "--node-rank")
    with (
        kept_port() as port,
        started([*RUN, *words, 0, "--master-port", port, "leave.py", 0, 3], tmp_path) as zero,
        started([*RUN, *words, 1, "--master-port", port, "leave.py", 0, 3], tmp_path) as one,
    ):
        done = [finish(zero), finish(one)]
    assert [each.code for each in done] == [75, 75], done[0].err + done[1].err
