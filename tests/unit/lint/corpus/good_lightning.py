# SPDX-License-Identifier: Apache-2.0
"""A LightningModule of a course, on two GPUs."""

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        if batch_idx % 100 == 0 and self.trainer.is_global_zero:
            print(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.val_acc(logits, y)
        self.log("val_acc", self.val_acc, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def main(train_set, val_set):
    L.seed_everything(1)
    trainer = L.Trainer(accelerator="gpu", devices=2, strategy="ddp", max_epochs=3)
    trainer.fit(Classifier(), DataLoader(train_set, 64, shuffle=True), DataLoader(val_set, 64))
    trainer.save_checkpoint("last.ckpt")
