# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits with `ddpilot.Trainer`: a small CNN on two ranks, then predictions and an export, in one script.

Run `python examples/digits_trainer.py --epochs 5 --nproc-per-node 2`, or under `ddpilot run` or torchrun, where it
trains on the ranks that are there. In a notebook: paste all but the last lines, and call
`main(epochs=5, nproc_per_node=2)`.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

import ddpilot

# Suffixes of tensors: N images of 1 x 8 x 8 pixels, K = 10 digits.


def make_data() -> tuple[TensorDataset, TensorDataset]:
    """1,440 images to train on, and 357 to test with."""
    digits = load_digits()
    images_N188 = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels_N = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels_N)), test_size=357, random_state=0, stratify=labels_N)
    return TensorDataset(images_N188[train], labels_N[train]), TensorDataset(images_N188[test], labels_N[test])


def make_model() -> nn.Module:
    """Two convolutions with GroupNorm, which does not care how many samples a rank has."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 2 * 2, 10)),
    )


def is_right(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of scores (N, K) and labels (N): 1.0 or 0.0 for each image; the trainer takes the mean over all of them."""
    return (scores.argmax(dim=1) == labels).float()


def main(epochs: int, nproc_per_node: int) -> float:
    """Train, say how good it is, export; the test accuracy."""
    train_set, test_set = make_data()
    torch.manual_seed(0)
    model = make_model()
    trainer = ddpilot.Trainer(
        model,
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.003),
        metrics={"accuracy": is_right},
        ema=0.9,
    )
    trainer.fit(train_set, test_set, epochs=epochs, global_batch_size=64, nproc_per_node=nproc_per_node)
    accuracy = float(trainer.evaluate(test_set)["accuracy"])
    scores_NK = trainer.predict(test_set)
    if scores_NK is not None:  # on ranks, rank 0 has them
        print(f"test accuracy {accuracy:.1%}; the first ten digits are {scores_NK[:10].argmax(dim=1).tolist()}")
        exported = torch.export.export(model.eval(), (test_set.tensors[0][:2].to(next(model.parameters()).device),))
        assert len(exported.module()(*exported.example_inputs[0])) == 2
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images")
    parser.add_argument("--nproc-per-node", type=int, default=2, help="ranks to start")
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.nproc_per_node)
