# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call,untyped-decorator"
"""Programs of Lightning, Accelerate and Transformers, right or with one fault, for `verify`."""

from __future__ import annotations

import os
import runpy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.dist.diagnose.verify_programs import BATCH_SIZE, make_data, make_model

SHIM = Path(__file__).parents[2] / "notebook" / "shims" / "sitecustomize.py"
"""Makes torchvision importable, which Lightning and Transformers import, where its binary does not fit."""


def with_lightning(*, factor_of: str = "", dropout: float = 0.0) -> None:
    """A Trainer that accumulates two batches; the loss is multiplied by `trainer.<factor_of>`."""
    warnings.simplefilter("ignore")
    runpy.run_path(str(SHIM))
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model(nn.Dropout(dropout))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = functional.cross_entropy(self.net(batch[0]), batch[1])
            return loss * (getattr(self.trainer, factor_of) if factor_of else 1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(make_data(), batch_size=BATCH_SIZE, shuffle=True))


def scaled_in_lightning() -> None:
    """Multiplied by the number of ranks."""
    with_lightning(factor_of="world_size")


def with_accelerate(*layers: nn.Module) -> None:
    """Loaders that Accelerate divides, in an order that it draws, and reads one batch ahead."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = make_model(*layers)
    loader = DataLoader(make_data(), batch_size=BATCH_SIZE, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(functional.cross_entropy(model(x), y))
        optimizer.step()


def batch_norm_in_accelerate() -> None:
    """Each rank normalizes with its own samples."""
    with_accelerate(nn.BatchNorm1d(16))


class _Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.x, self.y = make_data().tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.net(x)
        return {"loss": functional.cross_entropy(output, labels), "logits": output}


def with_transformers(*, sums: bool = False) -> None:
    """Transformers' Trainer, which clips gradients and schedules the learning rate. `sums`: a sum over the batch."""
    runpy.run_path(str(SHIM))
    from transformers import Trainer, TrainingArguments

    class OfSums(Trainer):  # type: ignore[misc]  # mypy does not read transformers
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return model(**inputs)["loss"] * len(inputs["labels"])

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH_SIZE,
            num_train_epochs=1,
            max_grad_norm=0.0 if sums else 1.0,
            lr_scheduler_type="linear",
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        (OfSums if sums else Trainer)(model=_WithLoss(), args=arguments, train_dataset=_Rows()).train()


def sums_in_transformers() -> None:
    """DDP takes the mean of sums."""
    with_transformers(sums=True)
