# SPDX-License-Identifier: Apache-2.0
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.f = torch.nn.Linear(4, 4)
        self.register_buffer("w", torch.ones(4))

    def training_step(self, batch, i):
        opt = self.optimizers()
        noise = torch.randn(4, device=self.device)
        loss = (self.f(batch + noise) * self.w).mean()
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()
        self.log("train_loss", loss, prog_bar=True)
        if self.trainer.is_global_zero and i % 100 == 0:
            print(i, loss.item())

    def validation_step(self, batch, i):
        self.log_dict({"val": self.f(batch).mean()}, sync_dist=True)

    def test_step(self, batch, i):
        self.log("rows", float(len(batch)), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


if __name__ == "__main__":
    pl.seed_everything(0, workers=True)
    loader = DataLoader(torch.randn(8, 4), 2, shuffle=True)
    trainer = pl.Trainer(accelerator="gpu", devices=2, strategy="ddp")
    trainer.fit(Net(), loader, loader)
    trainer.test(ckpt_path="best", dataloaders=loader)
    if trainer.is_global_zero:
        best = Net.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
        torch.save(best.state_dict(), "best.pt")
