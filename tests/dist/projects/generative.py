# SPDX-License-Identifier: Apache-2.0
"""Projects that generate: VAE, GAN, a critic with spectral norm, a codebook, a denoiser whose average is evaluated."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from tests.dist.projects.supervised import (
    GLOBAL_BATCH_SIZE,
    NUM_SAMPLES,
    Losses,
    Numbers,
    Project,
    Supervised,
    draw,
    make_loop,
    order_of,
    sgd,
    state_of,
    update,
)

X, NOISE = draw(NUM_SAMPLES, 6), draw(NUM_SAMPLES, 3, seed=1)
"""Noise comes with the samples, since each rank would draw other noise than one process."""


class VAE(nn.Module):
    """Gives mean and logarithm of the variance, and what it makes of them and the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 6), nn.Linear(3, 6)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (samples, 6), noise (samples, 3)."""
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def negative_elbo(model: nn.Module, batch: Any) -> Losses:
    """Sums over dimensions, and a mean over samples."""
    x, noise = batch
    made, mean, log_variance = model(x, noise)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
    return {"elbo": ((made - x).square().sum(1) + 0.1 * divergence).mean()}


class GAN:
    """Two models with an optimizer each; with spectral norm, whose vectors are buffers that each forward updates."""

    def __init__(self, *, has_spectral_norm: bool) -> None:
        self.has_spectral_norm = has_spectral_norm

    def make_models(self) -> tuple[nn.Module, nn.Module]:
        """Generator and critic."""
        torch.manual_seed(1)
        wrap = spectral_norm if self.has_spectral_norm else nn.Identity()
        critic = nn.Sequential(wrap(nn.Linear(6, 8)), nn.Tanh(), wrap(nn.Linear(8, 1)))
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)), critic

    @staticmethod
    def critic_loss(critic: nn.Module, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Real and made samples in one forward."""
        real, fake = critic(torch.cat([x, made])).squeeze(1).chunk(2)
        return (functional.softplus(-real) + functional.softplus(fake)).mean()

    def by_hand(self) -> Numbers:
        """A step of the critic, then one of the generator."""
        generator, critic = self.make_models()
        ours, theirs, losses = sgd(generator.parameters()), sgd(critic.parameters()), []
        for epoch in range(3):
            for numbers in order_of(epoch):
                x, noise = X[numbers], NOISE[numbers]
                loss = self.critic_loss(critic, x, generator(noise).detach())
                update(loss, theirs)
                critic.requires_grad_(False)
                made = functional.softplus(-critic(generator(noise))).mean()
                update(made, ours)
                critic.requires_grad_(True)
                losses += [loss.detach(), made.detach()]
        return {"losses": losses, "generator": state_of(generator), "critic": state_of(critic)}

    def with_loop(self) -> Numbers:
        """The generator's step goes through the plain critic, of which nothing is to cross."""
        loop = make_loop()
        generator, critic = self.make_models()
        ddp_generator, ours = loop.prepare(generator, sgd(generator.parameters()))
        ddp_critic, theirs = loop.prepare(critic, sgd(critic.parameters()))
        loader = loop.loader(TensorDataset(X, NOISE), global_batch_size=GLOBAL_BATCH_SIZE, shuffle=True)
        losses = []
        for _ in loop.epochs(3):
            for x, noise in loop.batches(loader):
                with loop.accumulate(ddp_critic):
                    loss = self.critic_loss(ddp_critic, x, generator(noise).detach())
                    loop.backward(loss)
                loop.step(theirs)
                critic.requires_grad_(False)
                with loop.accumulate(ddp_generator):
                    made = functional.softplus(-critic(ddp_generator(noise))).mean()
                    loop.backward(made)
                critic.requires_grad_(True)
                loop.step(ours)
                losses += [loop.reduce(loss, count=len(x)), loop.reduce(made, count=len(x))]
        return {"losses": losses, "generator": state_of(generator), "critic": state_of(critic)}


class Quantizer(nn.Module):
    """An autoencoder through the nearest of five codes, which follow a moving average and not the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 3), nn.Linear(3, 6)
        self.codes = nn.Buffer(torch.randn(5, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (samples, 6); what is made of the codes, inputs, codes, and which code each sample has."""
        inputs = self.encoder(x)
        chosen = torch.cdist(inputs, self.codes).argmin(1)
        codes = self.codes[chosen]
        return self.decoder(inputs + (codes - inputs).detach()), inputs, codes, chosen

    @torch.no_grad()
    def follow(self, counts: torch.Tensor, sums: torch.Tensor) -> None:
        """counts (5,) and sums (5, 3) of the inputs of each code, over all samples."""
        used = counts > 0
        self.codes[used] = 0.8 * self.codes[used] + 0.2 * sums[used] / counts[used, None]


def code_sums(inputs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """(5, 4): for each code how many samples have it, and the sum of their inputs."""
    ones = torch.cat([torch.ones(len(inputs), 1), inputs.detach()], dim=1)
    return torch.zeros(5, 4).index_add(0, chosen, ones)


class Codebook:
    """The codes follow the sums of all ranks, as libraries of vector quantization do in distributed training."""

    @staticmethod
    def loss_of(made: torch.Tensor, x: torch.Tensor, inputs: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Reconstruction, and how far inputs are from their codes."""
        return functional.mse_loss(made, x) + 0.25 * functional.mse_loss(inputs, codes.detach())

    def by_hand(self) -> Numbers:
        """Sums over the batch."""
        torch.manual_seed(1)
        model = Quantizer()
        optimizer, losses = sgd(model.parameters()), []
        for epoch in range(3):
            for numbers in order_of(epoch):
                made, inputs, codes, chosen = model(X[numbers])
                loss = self.loss_of(made, X[numbers], inputs, codes)
                update(loss, optimizer)
                sums = code_sums(inputs, chosen)
                model.follow(sums[:, 0], sums[:, 1:])
                losses.append(loss.detach())
        return {"losses": losses, "state": state_of(model)}

    def with_loop(self) -> Numbers:
        """Sums over the ranks' parts of the batch."""
        loop = make_loop()
        torch.manual_seed(1)
        plain = Quantizer()
        model, optimizer = loop.prepare(plain, sgd(plain.parameters()))
        loader = loop.loader(TensorDataset(X), global_batch_size=GLOBAL_BATCH_SIZE, shuffle=True)
        losses = []
        for _ in loop.epochs(3):
            for (x,) in loop.batches(loader):
                with loop.accumulate(model):
                    made, inputs, codes, chosen = model(x)
                    loss = self.loss_of(made, x, inputs, codes)
                    loop.backward(loss)
                losses.append(loop.reduce(loss))
                loop.step(optimizer)
                sums = loop.reduce(code_sums(inputs, chosen), "sum")
                plain.follow(sums[:, 0], sums[:, 1:])
        return {"losses": losses, "state": state_of(model)}


class Denoiser:
    """Predicts the noise of a sample at a time; a moving average of its weights is what is evaluated."""

    times = torch.linspace(0.1, 0.9, NUM_SAMPLES, dtype=torch.float64)

    @staticmethod
    def make_model() -> nn.Module:
        """Takes a noisy sample and its time."""
        return nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 3))

    @staticmethod
    def loss_of(model: nn.Module, x: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """A mean over samples."""
        noisy = torch.cat([x[:, :3] * (1 - time[:, None]) + noise * time[:, None], time[:, None]], dim=1)
        return functional.mse_loss(model(noisy), noise)

    def by_hand(self) -> Numbers:
        """The average takes part in nothing."""
        torch.manual_seed(1)
        model = self.make_model()
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
        for epoch in range(3):
            for numbers in order_of(epoch):
                loss = self.loss_of(model, X[numbers], NOISE[numbers], self.times[numbers])
                update(loss, optimizer)
                averaged.update_parameters(model)
                losses.append(loss.detach())
        with torch.no_grad():
            outputs = averaged(torch.cat([NOISE, self.times[:, None]], dim=1))
        return {"losses": losses, "average": state_of(averaged.module), "outputs": [outputs]}

    def with_loop(self) -> Numbers:
        """`predict` runs the average over all samples, in their order."""
        loop = make_loop()
        torch.manual_seed(1)
        plain = self.make_model()
        averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        model, optimizer = loop.prepare(plain, torch.optim.Adam(plain.parameters(), lr=0.01))
        data = TensorDataset(X, NOISE, self.times)
        loader = loop.loader(data, global_batch_size=GLOBAL_BATCH_SIZE, shuffle=True)
        losses = []
        for _ in loop.epochs(3):
            for x, noise, time in loop.batches(loader):
                with loop.accumulate(model):
                    loss = self.loss_of(model, x, noise, time)
                    loop.backward(loss)
                losses.append(loop.reduce(loss))
                if loop.step(optimizer):
                    averaged.update_parameters(plain)
        inputs = TensorDataset(torch.cat([NOISE, self.times[:, None]], dim=1))
        everything = loop.loader(inputs, global_batch_size=GLOBAL_BATCH_SIZE)
        outputs = loop.predict(averaged, everything, on_all_ranks=True)
        return {"losses": losses, "average": state_of(averaged.module), "outputs": [outputs]}


PROJECTS: dict[str, Project] = {
    "VAE": Supervised(make_model=VAE, losses=negative_elbo, dataset=TensorDataset(X, NOISE), num_epochs=4),
    "GAN": GAN(has_spectral_norm=False),
    "critic with spectral norm": GAN(has_spectral_norm=True),
    "codebook": Codebook(),
    "denoiser with an average": Denoiser(),
}
