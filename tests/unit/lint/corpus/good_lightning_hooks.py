# SPDX-License-Identifier: Apache-2.0
import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only


class Lit(L.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, i):
        loss = self.net(batch).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, i):
        self.log("val", self.net(batch).mean(), sync_dist=True)
        if self.global_rank == 0:
            self.logger.experiment.add_scalar("a", 1)

    @rank_zero_only
    def show(self, x):
        print(x)
        torch.save(self.net.state_dict(), "x.pt")

    def on_train_epoch_end(self):
        self.show(self.all_gather(torch.ones(1, device=self.device)).sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def main(loader):
    trainer = L.Trainer(devices=4, strategy="ddp")
    trainer.fit(Lit(torch.nn.Linear(2, 1)), loader)
    trainer.save_checkpoint("last.ckpt")
    if trainer.is_global_zero:
        print("done")
