# SPDX-License-Identifier: Apache-2.0
"""A user's program without a single `type: ignore`: `make dist` checks it with mypy and pyright against the wheel."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from typing_extensions import assert_type

import ddpilot
from ddpilot import callbacks, watch


def make_data(num_samples: int) -> TensorDataset:
    """Random inputs (N, 8) and labels (N,)."""
    return TensorDataset(torch.randn(num_samples, 8), torch.randint(10, (num_samples,)))


def train_with_ddp(epochs: int) -> dict[str, torch.Tensor]:
    """Train with torch's DDP in ranks of ddpilot."""
    with ddpilot.init_group() as group:
        model = DistributedDataParallel(nn.Linear(8, 10).to(group.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = make_data(64)
        sampler = DistributedSampler[tuple[torch.Tensor, ...]](data, group.world_size, group.rank)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for inputs, labels in DataLoader(data, batch_size=16, sampler=sampler):
                optimizer.zero_grad()
                loss = cross_entropy(model(inputs.to(group.device)), labels.to(group.device))
                torch.autograd.backward(loss)  # torch has no types for `loss.backward()`
                optimizer.step()
        return dict(ddpilot.unwrap(model).state_dict())


def train_with_loop(epochs: int, folder: Path) -> float:
    """Train with a Loop."""
    loop = ddpilot.Loop(seed=0, checkpoint_dir=folder, loggers=[ddpilot.CsvLogger(folder / "log.csv")])
    linear = nn.Linear(8, 10)
    model, optimizer = loop.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
    loader = loop.loader(make_data(64), global_batch_size=32, shuffle=True)
    for _epoch in loop.epochs(epochs):
        for inputs, labels in loop.batches(loader):
            loss = cross_entropy(model(inputs), labels)
            loop.backward(loss)
            assert_type(loop.step(optimizer), bool)
            loop.log({"loss": loss})
    return float(loop.evaluate(model, loader, {"loss": cross_entropy})["loss"])


class PrintLoss(ddpilot.Callback):
    """A user's callback."""

    def on_epoch_end(self, run: ddpilot.Run) -> None:
        """Print the loss of the last batch."""
        if run.loss is not None:
            print(run.epoch, run.loss.item())


def train_with_trainer(epochs: int) -> list[dict[str, object]]:
    """Train with a Trainer."""
    trainer = ddpilot.Trainer(
        nn.Linear(8, 10),
        cross_entropy,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        callbacks=[PrintLoss(), callbacks.EarlyStopping()],
    )
    history = trainer.fit(make_data(64), make_data(32), epochs=epochs, global_batch_size=16, nproc_per_node=2)
    return [dict(row) for row in history.epochs]


@ddpilot.rank_zero_only
def save(state: dict[str, torch.Tensor], path: Path) -> int:
    """Save on rank 0; the number of tensors."""
    torch.save(state, path)
    return len(state)


def report(finding: ddpilot.Finding) -> None:
    """Print a finding."""
    print(finding.code, finding.summary, file=sys.stderr)


def main() -> int:
    """Launch, and handle what can fail."""
    watch.enable()
    launcher = ddpilot.Launcher(nproc_per_node=2, timeout_s=60.0, on_finding=report)
    try:
        results = launcher.run(train_with_ddp, 2)
    except ddpilot.RankError as error:
        print(error.rank, error.last_lines)
        return error.exitcode
    except (ddpilot.LaunchTimeoutError, ddpilot.WatchError) as error:
        for finding in error.findings:
            report(finding)
        return 1
    assert_type(save(results[0], Path("weights.pt")), int | None)
    with ddpilot.Session(2) as session:
        cell = session.execute("1 + 1")
        assert_type(cell, ddpilot.CellResult)
    return 0


if __name__ == "__main__":
    sys.exit(main())
