# SPDX-License-Identifier: Apache-2.0
"""A GAN that draws handwritten digits: two models, two optimizers, and the same numbers on one, two or four ranks.

    python examples/gan.py --epochs 40
    ddpilot run examples/gan.py -n 2 -- --epochs 40
    results = ddpilot.launch(gan.train, 40, nproc_per_node=2)  # in a notebook here, after `import gan`

It learns from the digits of scikit-learn (1,797 scans of 8 x 8 pixels, read from the installed package).

Shapes: B images in the batch of one rank, P = 64 pixels, Z = 16 numbers that an image is drawn from.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import Dataset

import ddpilot

NUM_PIXELS = 64
NUM_LATENT = 16


class DigitsAndNoise(Dataset[tuple[Tensor, Tensor]]):
    """A real image (P,) from -1 to 1, and the noise (Z,) that the generator draws another one from.

    The loader seeds each sample by the seed, the epoch and the sample's number, so that the noise too is the same on
    any number of ranks. Noise that is drawn in the loop would depend on the rank.
    """

    def __init__(self) -> None:
        self.images_NP = torch.tensor(load_digits().data, dtype=torch.get_default_dtype()) / 8 - 1

    def __len__(self) -> int:
        return len(self.images_NP)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.images_NP[number], torch.randn(NUM_LATENT)


def build_models() -> tuple[nn.Module, nn.Module]:
    """A generator, (B, Z) to (B, P), and a critic, (B, P) to (B, 1): above 0 for what it takes for real."""
    generator = nn.Sequential(
        nn.Linear(NUM_LATENT, 128), nn.LayerNorm(128), nn.ReLU(),
        nn.Linear(128, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, NUM_PIXELS), nn.Tanh(),
    )  # fmt: skip
    critic = nn.Sequential(
        nn.Linear(NUM_PIXELS, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)
    )
    return generator, critic


def render_images(images_BP: Tensor) -> str:
    """The images side by side, as text."""
    shades_BHW = ((images_BP.reshape(-1, 8, 8) + 1) * 4).round().int().clamp(0, 7).tolist()
    return "\n".join(
        "   ".join("".join(" .:-=+*#"[s] * 2 for s in image[row]) for image in shades_BHW) for row in range(8)
    )


def train(epochs: int = 40, global_batch_size: int = 64, lr: float = 2e-4) -> dict[str, Any]:
    """Train both; losses of each batch, how often the critic is right, and generated images. Collective."""
    loop = ddpilot.Loop(seed=0)
    data = DigitsAndNoise()
    generator, critic = build_models()
    optimizers = [torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.999)) for model in (generator, critic)]
    ddp_generator, ddp_critic, generator_optimizer, critic_optimizer = loop.prepare(generator, critic, *optimizers)
    loader = loop.loader(data, global_batch_size=global_batch_size, shuffle=True)
    losses = []
    for epoch in loop.epochs(epochs):
        for real_BP, noise_BZ in loop.batches(loader):
            fake_BP = ddp_generator(noise_BZ)
            scores = ddp_critic(torch.cat([real_BP, fake_BP.detach()]))
            is_real = torch.cat([torch.ones_like(real_BP[:, :1]), torch.zeros_like(real_BP[:, :1])])
            critic_loss = binary_cross_entropy_with_logits(scores, is_real)
            loop.backward(critic_loss)
            loop.step(critic_optimizer)
            # The plain critic, with its weights frozen: in this pass none of its gradients crosses between ranks.
            critic.requires_grad_(False)
            scores = critic(fake_BP)
            generator_loss = binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
            loop.backward(generator_loss)
            critic.requires_grad_(True)
            loop.step(generator_optimizer)
            losses.append([loop.reduce(loss).item() for loss in (critic_loss, generator_loss)])
        loop.print(f"epoch {epoch + 1}/{epochs}: critic {losses[-1][0]:.4f}, generator {losses[-1][1]:.4f}", flush=True)
    in_order = loop.loader(data, global_batch_size=256)
    right = loop.evaluate(
        critic,
        in_order,
        {"real": lambda real, fake: real > 0, "fake": lambda real, fake: fake <= 0},
        forward=lambda model, batch: (model(batch[0]), model(generator(batch[1]))),
    )
    images_NP = loop.predict(generator, in_order, forward=lambda model, batch: model(batch[1]))
    loop.print(f"the critic knows {right['real']:.1%} of the real images and {right['fake']:.1%} of the drawn ones")
    if loop.rank == 0:
        print(render_images(images_NP[:5]), flush=True)
    weights = {name: weight.detach() for name, weight in generator.state_dict().items()}
    return {"losses": losses, "right": right, "weights": weights, "images": images_NP}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a GAN on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=40)
    train(parser.parse_args().epochs)
