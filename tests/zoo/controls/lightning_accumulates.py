# SPDX-License-Identifier: Apache-2.0
"""Lightning accumulates two batches: the backward that is reduced runs in the optimizer's closure."""

import logging
import os
import runpy
import warnings
from pathlib import Path

import torch

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
# This torch's torchvision may be without its operators.
runpy.run_path(str(Path(__file__).parents[2] / "notebook" / "shims" / "sitecustomize.py"))
try:
    import lightning
except ImportError:
    raise SystemExit(0) from None


class Model(lightning.LightningModule):
    """A small one."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def training_step(self, batch, index):
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val", (self.net(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.02)


lightning.seed_everything(0, verbose=False)
data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randn(40, 1))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=4,
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(data, 4, shuffle=True), torch.utils.data.DataLoader(data, 4))
