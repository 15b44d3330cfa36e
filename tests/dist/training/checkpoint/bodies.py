# SPDX-License-Identifier: Apache-2.0
"""What the ranks of these tests run: a small DDP training that saves at every step, and joint calls that go wrong."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpilot
from ddpilot.checkpoint.collective import RNG, CollectiveCheckpoints, on_all_ranks
from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.checkpoint.manifest import RunProgress
from ddpilot.checkpoint.weights import load_into
from ddpilot.data.global_batches import Plan
from ddpilot.errors import CheckpointError
from ddpilot.group.device import restore_rng
from ddpilot.group.protocol import GroupLike

NUM_SAMPLES = 24
GLOBAL_BATCH_SIZE = 4
BATCHES_PER_EPOCH = NUM_SAMPLES // GLOBAL_BATCH_SIZE
SEED = 3


class Training:
    """Model, optimizer, scheduler and data of one rank, and how far they are."""

    def __init__(self, group: GroupLike) -> None:
        torch.manual_seed(SEED)
        self.group = group
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.inputs, self.targets = torch.randn(NUM_SAMPLES, 5).double(), torch.randn(NUM_SAMPLES, 1).double()
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [5, 9], gamma=0.5)
        self.plan = Plan(NUM_SAMPLES, GLOBAL_BATCH_SIZE, world_size=group.world_size, seed=SEED, shuffle=True)
        self.step = 0
        self.taken: dict[int, list[int]] = {}
        torch.manual_seed(100 + group.rank)

    def resume(self, checkpoints: CollectiveCheckpoints) -> None:
        """Go on where the latest checkpoint stands, if there is one."""
        found = checkpoints.latest()
        if found is None:
            return
        saved = found.manifest.progress
        assert (saved.dataset_length, saved.global_batch_size, saved.seed) == (NUM_SAMPLES, GLOBAL_BATCH_SIZE, SEED)
        load_into(self.model, found.weights(), source=str(found.path))
        state = found.state()
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = found.manifest.progress.step
        part = found.part(self.group.rank)
        if part is not None:
            restore_rng(part[RNG], self.group.device)

    def update(self) -> None:
        """One optimizer step over one global batch."""
        epoch, batch = divmod(self.step, BATCHES_PER_EPOCH)
        start, stop = self.plan.epoch(0).piece(batch, self.group.rank)
        samples = self.taken[self.step] = self.plan.order(epoch)[start:stop].tolist()
        errors = (self.model(self.inputs[samples]) - self.targets[samples]) ** 2
        self.optimizer.zero_grad()
        (errors.sum() / GLOBAL_BATCH_SIZE * self.group.world_size).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1

    def save(self, checkpoints: CollectiveCheckpoints) -> None:
        """Save where it stands."""
        epoch, batch = divmod(self.step, BATCHES_PER_EPOCH)
        checkpoints.save(
            RunProgress(
                step=self.step,
                epoch=epoch,
                batch=batch,
                samples_seen=self.step * GLOBAL_BATCH_SIZE,
                seed=SEED,
                world_size=self.group.world_size,
                dataset_length=NUM_SAMPLES,
                global_batch_size=GLOBAL_BATCH_SIZE,
            ),
            weights={"model": self.model.state_dict()},
            state={"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()},
        )


def train(folder: Path, num_steps: int, *, killed: tuple[int, int] | None = None) -> dict[str, Any]:
    """Train to step `num_steps`, saving at every step, from the latest checkpoint in `folder` on.

    `killed`: a rank and the step in whose save it kills itself. Returns weights, first step and samples by step.
    """
    with ddpilot.init_group("gloo") as group, CheckpointDir(folder) as directory:
        checkpoints = CollectiveCheckpoints(group, directory)
        checkpoints.check_writable()
        training = Training(group)
        training.resume(checkpoints)
        first = training.step
        while training.step < num_steps:
            training.update()
            training.save(checkpoints)
            if killed == (group.rank, training.step):
                os.kill(os.getpid(), signal.SIGKILL)
        assert checkpoints.wait()
        weights = {name: value.clone() for name, value in training.model.module.state_dict().items()}
        return {"weights": weights, "first": first, "taken": training.taken}


def failure(call: Callable[[], object]) -> str:
    """What a call that has to fail says."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


class Unreadable(float):
    """A metric of which rank 0 makes no number."""

    def __float__(self) -> float:
        raise RuntimeError("no value")


def fail_jointly(folder: Path) -> list[str]:
    """What each joint call that one rank cannot do says on this rank; and that the ranks can go on after it."""
    with ddpilot.init_group("gloo") as group:
        (folder / "file").write_text("")
        refused = CollectiveCheckpoints(group, CheckpointDir(folder / "file"))
        good = CheckpointDir(folder / "good")
        checkpoints = CollectiveCheckpoints(group, good)
        progress = RunProgress(step=1, world_size=group.world_size)
        said = [
            failure(refused.check_writable),
            failure(lambda: checkpoints.save(progress, weights={}, part={"fn": len} if group.rank == 1 else {})),
            failure(lambda: checkpoints.save(progress, weights={}, state={"fn": len} if group.rank == 0 else {})),
            failure(lambda: checkpoints.save(progress, weights={}, metrics={"loss": Unreadable()})),
            failure(lambda: on_all_ranks(group, lambda: dict[str, int]()["it"] if group.rank == 1 else None)),
        ]
        assert checkpoints.latest() is None
        undefined = {"auc": math.nan}  # no metric of its own is a reason to take it for another checkpoint
        checkpoints.save(
            progress, weights={"model": {"w": torch.ones(2)}}, part={"rank": group.rank}, metrics=undefined
        )
        assert checkpoints.wait()
        found = checkpoints.latest()
        assert found is not None
        part = found.part(group.rank)
        assert part is not None
        assert part["rank"] == group.rank
        # As where the directory lies on each machine's own disk.
        elsewhere = CheckpointDir(folder / ("good" if group.is_rank_zero else f"rank-{group.rank}"))
        said.append(failure(CollectiveCheckpoints(group, elsewhere).latest))
        group.barrier()
        return said
