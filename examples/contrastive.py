# SPDX-License-Identifier: Apache-2.0
"""Contrastive learning (InfoNCE) on handwritten digits: all other images of the batch are negatives, on any ranks.

    python examples/contrastive.py --epochs 20
    ddpilot run examples/contrastive.py -n 2 -- --epochs 20
    results = ddpilot.launch(contrastive.train, 20, nproc_per_node=2)  # in a notebook here, after `import contrastive`

Each image is compared with a shifted, noisy copy of itself and with those of all other images of the batch, also on
other ranks. `loop.gather_batch` gives every rank the rows of all of them, with exact gradients, so the losses are those
of one process. It learns from the digits of scikit-learn (1,797 scans of 8 x 8 pixels, from the installed package).

Shapes: B images in the batch of one rank, G in that of all ranks, P = 64 pixels, D = 16 features.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import Dataset

import ddpilot

NUM_PIXELS = 64
NUM_FEATURES = 16


class DigitPairs(Dataset[tuple[Tensor, Tensor]]):
    """An image (P,) and a copy of it that is shifted by up to a pixel and noisy, another one in each epoch.

    The loader seeds each sample by the seed, the epoch and the sample's number: the copies are the same on any number
    of ranks.
    """

    def __init__(self) -> None:
        self.images_NHW = torch.tensor(load_digits().images, dtype=torch.get_default_dtype()) / 16

    def __len__(self) -> int:
        return len(self.images_NHW)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        image_HW = self.images_NHW[number]
        shifts = torch.randint(-1, 2, (2,)).tolist()
        copy_HW = image_HW.roll(shifts, (0, 1)) + 0.1 * torch.randn(8, 8)
        return image_HW.reshape(-1), copy_HW.reshape(-1)


def build_model() -> nn.Module:
    """(B, P) to (B, D)."""
    return nn.Sequential(nn.Linear(NUM_PIXELS, 64), nn.ReLU(), nn.Linear(64, NUM_FEATURES))


def compute_loss(loop: ddpilot.Loop, features_BD: Tensor, copies_BD: Tensor, temperature: float = 0.2) -> Tensor:
    """The mean over this rank's images of how badly each finds its copy among all copies, and the other way round."""
    features_BD, copies_BD = normalize(features_BD, dim=1), normalize(copies_BD, dim=1)
    features_GD, first = loop.gather_batch(features_BD)
    copies_GD, _ = loop.gather_batch(copies_BD)
    own_B = first + torch.arange(len(features_BD), device=features_BD.device)
    return (
        cross_entropy(features_BD @ copies_GD.T / temperature, own_B)
        + cross_entropy(copies_BD @ features_GD.T / temperature, own_B)
    ) / 2


def train(epochs: int = 20, global_batch_size: int = 200, lr: float = 1e-2) -> dict[str, Any]:
    """Losses of each batch, the weights, and how many images are nearest to their own copy. Collective."""
    loop = ddpilot.Loop(seed=0)
    data = DigitPairs()
    model = build_model()
    model, optimizer = loop.prepare(model, torch.optim.Adam(model.parameters(), lr=lr))
    loader = loop.loader(data, global_batch_size=global_batch_size, shuffle=True)
    losses = []
    for epoch in loop.epochs(epochs):
        for images_BP, copies_BP in loop.batches(loader):
            with loop.accumulate(model):
                features_BD, copies_BD = model(torch.cat([images_BP, copies_BP])).tensor_split([len(images_BP)])
                loss = compute_loss(loop, features_BD, copies_BD)
                loop.backward(loss)
            loop.step(optimizer)
            losses.append(loop.reduce(loss).item())
        loop.print(f"epoch {epoch + 1}/{epochs}: loss {losses[-1]:.4f}", flush=True)
    found = loop.predict(
        model,
        loop.loader(data, global_batch_size=256),
        forward=lambda model, batch: (normalize(model(batch[0]), dim=1), normalize(model(batch[1]), dim=1)),
        on_all_ranks=True,
    )
    features_ND, copies_ND = found
    right = (features_ND @ copies_ND.T).argmax(1) == torch.arange(len(data))
    loop.print(f"{right.float().mean():.1%} of {len(data)} images are nearest to their own copy", flush=True)
    weights = {name: weight.detach() for name, weight in ddpilot.unwrap(model).state_dict().items()}
    return {"losses": losses, "weights": weights, "num_right": int(right.sum())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learn features of handwritten digits without labels.")
    parser.add_argument("--epochs", type=int, default=20)
    train(parser.parse_args().epochs)
