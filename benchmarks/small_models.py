# SPDX-License-Identifier: Apache-2.0
"""Small models and data on which numbers are compared: in float64 only the order of summation is left to differ."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

NUM_SAMPLES = 113
"""With a global batch of 12: nine full batches and one of five, the accumulation groups 3, 3, 3 and 1."""
GLOBAL_BATCH_SIZE = 12
VOCABULARY = 11
LENGTH = 8


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
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
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
    """An "mlp", a "cnn" with GroupNorm or a "gpt", in the default dtype."""
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
    """Samples in the default dtype and targets; of a text some targets are left out (-100), in some samples all."""
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
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(torch.get_default_dtype())
    return TensorDataset(x, x.flatten(1)[:, :5].argmax(1))


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over samples, or over the tokens of a text that are no -100."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Per sample: the share of right answers, with a smooth part so that rounding would show."""
    right = (output.argmax(-1) == target).double() + output.double().softmax(-1).amax(-1)
    return right.reshape(len(target), -1).mean(1)
