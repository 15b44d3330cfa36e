# SPDX-License-Identifier: Apache-2.0
"""What the ranks of these tests run: small models and data in float64, where only the order of summation differs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpilot
from ddpilot.training.loop import Loop
from ddpilot.training.wrapping import unwrap

NUM_SAMPLES = 113
"""With a global batch of 12: nine full batches and one of five, the accumulation groups 3, 3, 3 and 1."""
VOCABULARY = 11
LENGTH = 8


def launch(num_ranks: int, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """What every rank returned, in at most 100 seconds."""
    return ddpilot.Launcher(nproc_per_node=num_ranks, timeout_s=100).run(fn, *args, **kwargs)


class Block(nn.Module):
    """One causal transformer block with a single head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, tokens, width), and so is the result."""
        query, key, value = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        scores = (query @ key.transpose(-2, -1)) / math.sqrt(x.shape[-1])
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + scores.masked_fill(later, -math.inf).softmax(-1) @ value
        return torch.as_tensor(x + self.mlp(self.norms[1](x)))


class TinyGPT(nn.Module):
    """Two blocks over characters."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.1)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, tokens) of integers; the result has logits in a third dimension."""
        return torch.as_tensor(self.head(self.blocks(self.tokens(x) + self.places)))


def make_model(kind: str) -> nn.Module:
    """An "mlp", a "cnn" with GroupNorm or a "gpt"."""
    if kind == "mlp":
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    if kind == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, stride=2),
            nn.Flatten(),
            nn.Linear(36, 5),
        )
    return TinyGPT()


def make_data(kind: str, num_samples: int = NUM_SAMPLES) -> TensorDataset:
    """Samples and targets; of a text some targets are left out (-100), all of them in some samples."""
    generator = torch.Generator().manual_seed(7)
    if kind == "gpt":
        begin = torch.randint(VOCABULARY, (num_samples, 1), generator=generator)
        noise = torch.rand(num_samples, LENGTH + 1, generator=generator) < 0.2
        text = (begin + 3 * torch.arange(LENGTH + 1) + noise.long()) % VOCABULARY
        targets = text[:, 1:].clone()
        lengths = torch.randint(0, LENGTH + 1, (num_samples, 1), generator=generator)
        targets[torch.arange(LENGTH) >= lengths] = -100
        return TensorDataset(text[:, :-1], targets)
    shape = (num_samples, 8) if kind == "mlp" else (num_samples, 1, 8, 8)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.flatten(1)[:, :5].argmax(1))


def take_step(loop: Loop, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Forward and backward of one batch; the mean loss of all ranks' samples or tokens."""
    with loop.accumulate(model):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())
        count = int((y != -100).sum()) if y.ndim > 1 else None
        loop.backward(loss, count=count)
    return loop.reduce(loss, count=count)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Per sample: the share of right answers, with a smooth part so that rounding would show."""
    right = (output.argmax(-1) == target).double() + output.double().softmax(-1).amax(-1)
    return right.reshape(len(target), -1).mean(1)


def train(kind: str, num_epochs: int, shares: dict[int, list[float]], workers: int = 0) -> dict[str, Any]:
    """Train, and return the loss of each batch, the weights and the metric on other data."""
    torch.set_default_dtype(torch.float64)
    loop = Loop(seed=3, accumulate=3)
    model = make_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    model, optimizer = loop.prepare(model, optimizer)
    options = {"global_batch_size": 12, "shares": shares.get(loop.world_size)}
    loader = loop.loader(make_data(kind), shuffle=True, num_workers=workers, **options)
    losses = []
    for _ in loop.epochs(num_epochs):
        for x, y in loop.batches(loader):
            losses.append(take_step(loop, model, x, y).item())
            loop.clip_grad_norm_(model.parameters(), 0.5)
            loop.step(optimizer, scheduler)
    validation = loop.loader(make_data(kind, 37), global_batch_size=12)
    return {
        "losses": losses,
        "num_updates": loop.num_updates,
        "weights": {name: weight.detach() for name, weight in unwrap(model).state_dict().items()},
        "metric": loop.evaluate(model, validation, {"accuracy": accuracy})["accuracy"],
        "lr": scheduler.get_last_lr(),
    }
