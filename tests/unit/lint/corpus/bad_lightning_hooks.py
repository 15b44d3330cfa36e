# SPDX-License-Identifier: Apache-2.0
import torch
import lightning as L
from torch.nn.parallel import DistributedDataParallel as DDP


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, i):
        x, y = batch
        loss = (self.net(x.cuda()) - y).square().mean()  # expect: DDP118
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, i):
        x, y = batch
        self.log("val", (self.net(x) - y).square().mean())  # expect: DDP411

    def on_train_epoch_end(self):
        if self.global_rank == 0:
            everything = self.all_gather(torch.ones(1))  # expect: DDP220
            print(everything)
        torch.save(self.net.state_dict(), "net.pt")  # expect: DDP603

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def main(loader):
    lit = Lit()
    trainer = L.Trainer(accelerator="gpu", devices=4, strategy="ddp")
    trainer.fit(DDP(lit), loader)  # expect: DDP337
    if trainer.is_global_zero:
        trainer.save_checkpoint("last.ckpt")  # expect: DDP220
        trainer.test(lit, loader)  # expect: DDP220
