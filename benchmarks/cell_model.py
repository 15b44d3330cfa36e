# SPDX-License-Identifier: Apache-2.0
"""What the random cells train, and what its parameters must be after any number of steps, worked out on one process."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

NUM_RANKS = 4
_BATCH = 8
_NUM_FEATURES = 6
_LEARNING_RATE = 0.02
_MOMENTUM = 0.9


def make_net(seed: int) -> torch.nn.Module:
    """The net, in float64, its parameters drawn from `seed`."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(_NUM_FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 1)).double()


def make_optimizer(net: torch.nn.Module) -> torch.optim.SGD:
    """An optimizer whose state matters."""
    return torch.optim.SGD(net.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)


def loss_of(net: torch.nn.Module, seed: int, step: int, rank: int) -> torch.Tensor:
    """The loss of one rank's batch of one step."""
    draw = torch.Generator().manual_seed(seed * 1_000_003 + step * 101 + rank)
    loss: torch.Tensor = net(torch.randn(_BATCH, _NUM_FEATURES, generator=draw, dtype=torch.float64)).square().mean()
    return loss


def snapshot(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """All parameters and all of the optimizer's momentum as one vector; zeros where there is no momentum yet."""
    parameters = list(net.parameters())
    momenta = [optimizer.state[each].get("momentum_buffer") for each in parameters]
    filled = [torch.zeros_like(p) if m is None else m for p, m in zip(parameters, momenta, strict=True)]
    return torch.cat([each.detach().flatten() for each in (*parameters, *filled)])


class Expected:
    """The trajectory of one net on all ranks' batches together. Without torch.optim, which loads a compiler."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._net = make_net(seed)
        self._parameters = list(self._net.parameters())
        self._momenta = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._after = [self._snapshot()]

    def after(self, num_steps: int) -> torch.Tensor:
        """What `snapshot` must give after `num_steps` steps."""
        while len(self._after) <= num_steps:
            step = len(self._after) - 1
            losses = [loss_of(self._net, self._seed, step, rank) for rank in range(NUM_RANKS)]
            gradients = torch.autograd.grad(torch.stack(losses).mean(), self._parameters)
            with torch.no_grad():
                for parameter, momentum, gradient in zip(self._parameters, self._momenta, gradients, strict=True):
                    momentum.mul_(_MOMENTUM).add_(gradient)
                    parameter.sub_(momentum, alpha=_LEARNING_RATE)
            self._after.append(self._snapshot())
        return self._after[num_steps]

    def _snapshot(self) -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in (*self._parameters, *self._momenta)])


# What cells call.


class SlowData(Dataset[int]):
    """Data that takes minutes to load."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.05)
        return index


def stamp(folder: str, rank: int) -> None:
    """Write down when this rank got here."""
    Path(folder, f"{rank}.writing").write_text(repr(time.monotonic()))
    Path(folder, f"{rank}.writing").rename(Path(folder, str(rank)))


def raise_on(bad_rank: int, folder: str) -> None:
    """A function for `Session.run`: one rank raises, the others wait for it."""
    rank = torch.distributed.get_rank()
    if rank == bad_rank:
        stamp(folder, rank)
        raise ValueError("bad sample")
    torch.distributed.barrier()
