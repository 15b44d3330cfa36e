# SPDX-License-Identifier: Apache-2.0
"""A complete toy library: `Classifier().train(..., devices=2)`, `predict` and `export`, from any notebook or script.

What makes it safe there is marked "notebook-safe" below; docs/how_to/library_authors.md explains each.
Shapes: B samples in a batch, F features, C classes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddpilot

__all__ = ["Classifier", "History", "Settings"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to train. `batch_size`: samples of all devices together in one step."""

    epochs: int = 5
    batch_size: int = 64
    lr: float = 0.01
    num_workers: int = 0


@dataclasses.dataclass(frozen=True)
class History:
    """What a training came to: the mean loss of each epoch over all devices, and how many there were."""

    losses: tuple[float, ...]
    world_size: int


class Classifier:
    """A small network for rows of numbers."""

    def __init__(self, num_features: int = 64, num_classes: int = 10) -> None:
        # Notebook-safe: made on the CPU. Importing the library and making a model touch no GPU.
        self.num_features = num_features
        self.net = nn.Sequential(nn.Linear(num_features, 64), nn.ReLU(), nn.Linear(64, num_classes))

    def train(
        self, rows: torch.Tensor, labels: torch.Tensor, *, devices: int | str = "auto", settings: Settings | None = None
    ) -> History:
        """Fit `rows` (B, F) to `labels` (B) on `devices` ranks ("auto": one for each GPU, else one), in place."""
        wanted = num_ranks(devices)
        # Notebook-safe: what travels to the ranks is the plain network, and what comes back is its state.
        arguments = (self.net.cpu(), rows.cpu(), labels.cpu(), settings or Settings())
        if ddpilot.topology().is_distributed:  # torchrun, srun or a session has started the ranks
            history, state = fit(*arguments)
        else:
            history, state = ddpilot.launch(fit, *arguments, nproc_per_node=wanted)[0]
        self.net.load_state_dict(state)
        return history

    @torch.inference_mode()
    def predict(self, rows: torch.Tensor) -> torch.Tensor:
        """The class (B) of each of `rows` (B, F), on a GPU if there is one."""
        # Notebook-safe: the first use moves the network; asking for a GPU at import would start CUDA.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        net = ddpilot.ensure_on_device(self.net, device).eval()
        scores: torch.Tensor = net(rows.to(device))
        return scores.argmax(1).cpu()

    def export(self, path: str | Path) -> Path:
        """Write the network for another program (`torch.export`), for batches of any size; return the path."""
        net = ddpilot.ensure_on_device(self.net, "cpu").eval()
        example = torch.zeros(2, self.num_features)
        program = torch.export.export(net, (example,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
        torch.export.save(program, path)
        return Path(path)


def num_ranks(devices: int | str) -> int | str:
    """The ranks that `devices` asks for, or "auto". Raises ValueError if a launcher has started a different number."""
    wanted = "auto" if devices in ("auto", -1) else int(devices) if str(devices).isdecimal() else 0
    if wanted == 0:
        raise ValueError(f"devices={devices!r}: give a number of devices, or 'auto'")
    topology = ddpilot.topology()
    if topology.is_distributed and wanted not in ("auto", topology.local_world_size):
        found = topology.local_world_size
        raise ValueError(f"devices={devices!r}, and {topology.environment} has started {found} ranks on this machine")
    return wanted


def fit(
    net: nn.Module, rows: torch.Tensor, labels: torch.Tensor, settings: Settings
) -> tuple[History, dict[str, torch.Tensor]]:
    """What every rank runs, under any launcher. Collective. Returns the same on each."""
    with ddpilot.init_group(seed=0) as group:
        ddp_net = DistributedDataParallel(ddpilot.ensure_on_device(net, group.device).train())
        optimizer = torch.optim.Adam(ddp_net.parameters(), settings.lr)
        data = TensorDataset(rows, labels)
        sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
            data, group.world_size, group.rank, seed=0
        )
        share = max(1, settings.batch_size // group.world_size)
        loader = DataLoader(data, share, sampler=sampler, num_workers=settings.num_workers)
        losses = []
        for epoch in range(settings.epochs):
            sampler.set_epoch(epoch)
            total = torch.zeros(2, dtype=torch.float64, device=group.device)
            for batch in loader:
                x_BF, y_B = (part.to(group.device) for part in batch)
                loss = cross_entropy(ddp_net(x_BF), y_B)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                total += torch.tensor([loss.item() * len(y_B), len(y_B)], device=group.device)
            sums = group.all_reduce(total)
            losses.append((sums[0] / sums[1]).item())
        state = {name: value.cpu() for name, value in net.state_dict().items()}
        return History(tuple(losses), group.world_size), state
