# SPDX-License-Identifier: Apache-2.0
import pytorch_lightning as pl
import torch
import torch.nn as nn
import torch.nn.functional as F


class GAN(pl.LightningModule):
    def __init__(self, latent=64):
        super().__init__()
        self.automatic_optimization = False
        self.g = nn.Linear(latent, 784)
        self.d = nn.Linear(784, 1)
        self.latent = latent

    def training_step(self, batch, _):
        imgs, _ = batch
        og, od = self.optimizers()
        z = torch.randn(imgs.shape[0], self.latent).cuda()  # expect: DDP118
        fake = self.g(z)
        lg = F.softplus(-self.d(fake)).mean()
        og.zero_grad()
        lg.backward()  # expect: DDP338
        og.step()
        ld = F.softplus(self.d(fake.detach())).mean()
        od.zero_grad()
        self.manual_backward(ld)
        od.step()

    def test_step(self, batch, batch_idx):
        self.log("test/score", self.d(batch[0]).mean())  # expect: DDP411

    def on_validation_end(self):
        if self.trainer.is_global_zero:
            self.trainer.strategy.barrier()  # expect: DDP220

    def configure_optimizers(self):
        return torch.optim.Adam(self.g.parameters()), torch.optim.Adam(self.d.parameters())


def cli(dm):
    trainer = pl.Trainer(accelerator="gpu", devices=-1, strategy="ddp", max_epochs=5)
    model = GAN()
    trainer.fit(model, dm)
    if trainer.global_rank == 0:
        trainer.test(model, dm)  # expect: DDP220
