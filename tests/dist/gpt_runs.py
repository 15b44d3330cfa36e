# SPDX-License-Identifier: Apache-2.0
"""Trainings of `examples/gpt.py` at a small size. Ranks import no other example, and so not scikit-learn."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Literal

import torch

import ddpilot
from examples import gpt

NUM_UPDATES = 9
KILLED_AFTER = 5

Precision = Literal["float64", "bf16"]


class _LostError(Exception):
    """Ends a training as a kill does, in the middle of an update, without ending the rank."""


def train(precision: Precision, checkpoint_dir: Path | None = None) -> dict[str, Any]:
    """A few updates on a stream of three files, of which one validates after every third update."""
    torch.set_default_dtype(torch.float64 if precision == "float64" else torch.float32)
    return gpt.train(
        NUM_UPDATES,
        3,
        global_batch_size=16,
        num_files=3,
        checkpoint_dir=checkpoint_dir,
        save_every="2 updates",
        precision="fp32" if precision == "float64" else precision,
        shard="parameters",
    )


def train_until_killed(folder: Path) -> None:
    """In bf16 until all ranks lose the training; then in float64 until a rank is killed, both after update 5."""
    original = ddpilot.Loop.step
    kills = False

    def step(loop: ddpilot.Loop, *args: Any, **options: Any) -> bool:
        done = original(loop, *args, **options)
        if loop.num_updates == KILLED_AFTER:
            if not kills:
                raise _LostError
            if loop.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return done

    ddpilot.Loop.step = step  # type: ignore[method-assign, assignment]
    try:
        train("bf16", folder / "bf16")
    except _LostError:
        kills = True
    train("float64", folder / "float64")


def resume(folder: Path) -> dict[str, Any]:
    """The rest of both trainings; and in bf16 also all of it, on these ranks, without a stop."""
    return {
        "float64": train("float64", folder / "float64"),
        "bf16": train("bf16", folder / "bf16"),
        "bf16 whole": train("bf16"),
    }
