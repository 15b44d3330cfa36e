# SPDX-License-Identifier: Apache-2.0
"""Programs that the tests here run as jobs, and the command that submits them."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.dist.launching.scripts import wait_until
from tests.slurm.cluster import Cluster

DDPILOT = (sys.executable, "-m", "ddpilot", "slurm")
PYTHON = ("--python", sys.executable)

EPOCHS = """\
    torch.manual_seed(0)
    loop = ddpilot.Loop(seed=0, checkpoint_dir="ckpt", progress=False)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    model, optimizer = loop.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.rand(240, 8, generator=generator), torch.rand(240, 1, generator=generator))
    loader = loop.prepare_data_loader(DataLoader(data, batch_size=12, shuffle=True))
    for epoch in loop.epochs(3):
        for x, y in loop.batches(loader):
"""
"""The same training in each program here; batches follow."""
TRAIN = (
    """
import os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import ddpilot

torch.set_default_dtype(torch.float64)
fail_after, pause_s = int(sys.argv[1]), float(sys.argv[2])
with ddpilot.init_group("gloo"):
"""
    + EPOCHS
    + """\
            if loop.num_updates == fail_after and loop.rank == loop.world_size - 1:
                raise ValueError("bad sample 17")
            loss = torch.nn.functional.mse_loss(model(x), y)
            loop.backward(loss)
            loop.step(optimizer)
            value = loop.reduce(loss).item()
            if loop.rank == 0:
                with open("losses", "a") as file:
                    print(loop.num_updates, value.hex(), loop.world_size, file=file, flush=True)
            time.sleep(pause_s)
    loop.print("trained", loop.num_updates, flush=True)
"""
)
"""60 updates; arguments: number of updates after which the last rank raises (-1: never), seconds to pause in each."""

TRAINER = """
import os, sys, time
import torch
from torch.utils.data import TensorDataset
import ddpilot

class Note(ddpilot.Callback):
    def on_update_end(self, run):
        if os.environ["RANK"] == "0":
            open("updates", "a").write("x")
        time.sleep(float(sys.argv[1]))

torch.manual_seed(0)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.rand(240, 8, generator=generator), torch.rand(240, 1, generator=generator))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
trainer = ddpilot.Trainer(model, torch.nn.functional.mse_loss, torch.optim.Adam, callbacks=[Note()])
history = trainer.fit(data, epochs=3, global_batch_size=12, checkpoint_dir="ckpt", progress=False)
if history.updates:
    print("history", [row["loss"].hex() for row in history.updates], flush=True)
"""
"""60 updates of a Trainer; argument: seconds to pause in each."""


def losses(folder: Path) -> dict[int, str]:
    """The loss of each update, as a hexadecimal float; AssertionError if an update was made twice."""
    rows = [line.split() for line in (folder / "losses").read_text().splitlines()]
    found = {int(number): value for number, value, _ in rows}
    assert len(found) == len(rows), f"updates were made twice: {[row[0] for row in rows]}"
    return found


class Followed:
    """A running `ddpilot slurm`, and what it has written."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.out, self.err = "", ""
        self.times_s: list[tuple[float, str]] = []
        """What stderr had at the time of each line, by the monotonic clock."""
        self._readers = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in ("out", "err")]
        for each in self._readers:
            each.start()

    def _read(self, name: str) -> None:
        stream = getattr(self.process, f"std{name}")
        for line in stream:
            setattr(self, name, getattr(self, name) + line)
            if name == "err":
                self.times_s.append((time.monotonic(), self.err))

    def wait_for(self, text: str, *, limit_s: float = 30.0) -> None:
        """Wait until it has written `text`."""
        wait_until(lambda: re.search(text, self.out + self.err) is not None, limit_s=limit_s)

    def wait(self, *, limit_s: float = 60.0) -> int:
        """Its exit status, once all that it wrote has been read."""
        status = self.process.wait(limit_s)
        for each in self._readers:
            each.join(10)
        return status

    @property
    def job_id(self) -> str:
        """The number of the job that it submitted."""
        self.wait_for(r"submitted job \d+")
        found = re.search(r"submitted job (\d+)", self.err)
        assert found is not None
        return found[1]


@contextmanager
def following(cluster: Cluster, folder: Path, program: str, *words: str) -> Iterator[Followed]:
    """`ddpilot slurm` of a program, with these words; killed afterwards if it still runs."""
    (folder / "train.py").write_text(program)
    command = [*DDPILOT, "train.py", *PYTHON, *words]
    with subprocess.Popen(
        command, cwd=folder, env=cluster.environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        followed = Followed(process)
        try:
            yield followed
        finally:
            process.kill()
            followed.wait()
