# SPDX-License-Identifier: Apache-2.0
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_only
from torch import nn


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.DataParallel(nn.Linear(4, 1))  # expect: DDP330

    def training_step(self, batch, i):
        return self.body(batch).mean()

    def validation_step(self, batch, i):
        return self._shared(batch, "val")

    def _shared(self, batch, stage):
        loss = self.body(batch).mean()
        self.log(f"{stage}_loss", loss, on_epoch=True)  # expect: DDP411
        return loss

    @rank_zero_only
    def on_validation_epoch_end(self):
        self.log("rank0", 1.0, sync_dist=True)  # expect: DDP220

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


if __name__ == "__main__":
    pl.Trainer(gpus=2, accelerator="ddp").fit(Model())
