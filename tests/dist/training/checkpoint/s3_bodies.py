# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the tests with an S3 server run. Each has a staging directory of its own, as on its own machine."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot.checkpoint.remote.store import RemoteStore
from ddpilot.errors import CheckpointError
from ddpilot.training.loop import Loop

NUM_EPOCHS = 3


def train(url: str, staging: Path | None = None, killed_at: str = "") -> dict[str, Any]:
    """Train for three epochs of three updates, with a checkpoint after each epoch, and return what was reached.

    `killed_at`: rank 0 kills itself before it uploads the first file whose name ends with this, in the second epoch.
    """
    torch.set_default_dtype(torch.float64)
    put = RemoteStore.put

    def put_or_die(self: RemoteStore, local: Path, name: str) -> None:
        if killed_at and name.endswith(killed_at):
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, local, name)

    RemoteStore.put = put_or_die  # type: ignore[method-assign]
    try:
        rank = int(os.environ["RANK"])
        loop = Loop(seed=3, checkpoint_dir=url, staging_dir=staging and staging / str(rank), keep=2, progress=False)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model, optimizer = loop.prepare(model, optimizer)
        x = torch.linspace(-1, 1, 4 * 17).reshape(17, 4)
        loader = loop.loader(TensorDataset(x, x.sum(1, keepdim=True).sin()), global_batch_size=6, shuffle=True)
        loop.resume()
        first = loop.num_updates
        for epoch in loop.epochs(NUM_EPOCHS):
            if killed_at and epoch == NUM_EPOCHS - 1:
                threading.Event().wait(60)  # otherwise all epochs may be over before the upload begins
            for inputs, targets in loop.batches(loader):
                with loop.accumulate(model):
                    loop.backward(nn.functional.mse_loss(model(inputs), targets))
                loop.step(optimizer)
    finally:
        RemoteStore.put = put  # type: ignore[method-assign]
    weights = {name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()}
    return {"first": first, "num_updates": loop.num_updates, "weights": weights}


def open_loops(urls: list[str], staging: Path, without_credentials: str) -> list[str]:
    """What `Loop` raises for each URL, and for the last one without credentials."""
    raised = []
    for url in [*urls, without_credentials]:
        if url == without_credentials:
            os.environ.pop("AWS_ACCESS_KEY_ID")
        try:
            Loop(checkpoint_dir=url, staging_dir=staging / os.environ["RANK"])
        except CheckpointError as error:
            raised.append(str(error))
        else:
            raised.append("nothing")
    return raised
