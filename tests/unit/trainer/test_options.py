# SPDX-License-Identifier: Apache-2.0
"""Options of a fit as dataclasses."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot import Trainer
from ddpilot.data.options import LoaderOptions
from ddpilot.training.models.ddp import DDPOptions
from ddpilot.training.options import CheckpointOptions


def test_fit_takes_option_dataclasses(tmp_path: Path) -> None:
    """As it takes dictionaries; the directory is an argument of its own."""
    model = nn.Linear(1, 1)
    data = TensorDataset(torch.ones(4, 1), torch.ones(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model=model, optimizer=optimizer, loss_fn=nn.MSELoss())
    trainer.fit(
        data,
        epochs=3,
        nproc_per_node=0,
        checkpoint_dir=tmp_path,
        loader=LoaderOptions(global_batch_size=2, weights=[0, 0, 1, 1], num_draws=6),
        checkpoints=CheckpointOptions(keep=2),
        ddp=DDPOptions(static_graph=True),
        progress=False,
    )
    assert (trainer.batch_size, trainer.position.num_updates) == (2, 9)
    assert sum(path.name.startswith("save-") for path in tmp_path.iterdir()) == 2
