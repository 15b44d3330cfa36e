# SPDX-License-Identifier: Apache-2.0
"""The same mistakes in Lightning's words."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader


class Regressor(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        weight = torch.ones(len(y)).cuda()  # expect: DDP118
        return (weight * (self.net(x) - y) ** 2).mean()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        val_loss = nn.functional.mse_loss(self.net(x), y)
        self.log("val_loss", val_loss, prog_bar=True)  # expect: DDP411
        return val_loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


trainer = pl.Trainer(devices=4, accelerator="gpu", strategy="ddp_find_unused_parameters_false")
trainer.fit(Regressor(), DataLoader([], 8, shuffle=True))
