# SPDX-License-Identifier: Apache-2.0
"""The script digits_plain.py on any number of ranks: the same losses and the same accuracy on one, two or four.

    python examples/digits_loop.py --epochs 5
    ddpilot run examples/digits_loop.py -n 2 -- --epochs 5
    results = ddpilot.launch(digits_loop.train, 5, nproc_per_node=2)  # in a notebook here, after `import digits_loop`

The plain script draws its weights and its order anew each time it is run; here they follow from `seed=0`.

It classifies the handwritten digits of scikit-learn (1,797 scans of 8 x 8 pixels, read from the installed package).

Shapes: N images, B of them in a batch of one rank, C = 10 digits, H = W = 8 pixels.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ddpilot

NUM_TEST = 360


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Training and test digits: images (N, 1, 8, 8) from 0 to 1 in the default dtype, labels (N,)."""
    digits = load_digits()
    images_NCHW = torch.tensor(digits.images, dtype=torch.get_default_dtype()).unsqueeze(1) / 16
    labels_N = torch.tensor(digits.target)
    order_N = torch.randperm(len(labels_N), generator=torch.Generator().manual_seed(0))
    train_N, test_N = order_N[NUM_TEST:], order_N[:NUM_TEST]
    return TensorDataset(images_NCHW[train_N], labels_N[train_N]), TensorDataset(images_NCHW[test_N], labels_N[test_N])


def build_model() -> nn.Module:
    """A small CNN: images (B, 1, 8, 8) to class scores (B, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 2 * 2, 10),
    )  # fmt: skip


def train(epochs: int = 5, batch_size: int = 64) -> tuple[list[float], float]:
    """Train; the loss of each batch and the share of right answers to the test images, 0 to 1."""
    loop = ddpilot.Loop(seed=0)
    train_data, test_data = load_data()
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = loop.prepare(model, optimizer)
    train_loader = loop.prepare_data_loader(DataLoader(train_data, batch_size=batch_size, shuffle=True))
    test_loader = loop.prepare_data_loader(DataLoader(test_data, batch_size=batch_size))
    losses = []
    for epoch in loop.epochs(epochs):
        for images_BCHW, labels_B in loop.batches(train_loader):
            loss = cross_entropy(model(images_BCHW), labels_B)
            loop.backward(loss)
            loop.step(optimizer)
            losses.append(loop.reduce(loss).item())
        loop.print(f"epoch {epoch + 1}/{epochs}: loss of the last batch {losses[-1]:.4f}", flush=True)
    accuracy = loop.evaluate(model, test_loader, {"right": lambda scores, y: scores.argmax(1) == y})["right"]
    loop.print(f"test accuracy {accuracy:.2%}", flush=True)
    return losses, accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=5)
    train(parser.parse_args().epochs)
