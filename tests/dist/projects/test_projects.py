# SPDX-License-Identifier: Apache-2.0
"""Projects as people have them give the numbers of plain PyTorch in one process, at 1, 2 and 3 ranks."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpilot
from tests.dist.projects.supervised import Numbers
from tests.preload import PRELOAD
from tests.soak import IS_SOAK, often

SUBJECTS = ("vision", "language", "sampling", "generative", "losses", "optimizing")
WORLD_SIZES = (1, 2, 3) if IS_SOAK else (3,)
BAR = 1e-10
LIMIT_S = 120
SHIM = Path(__file__).parents[2] / "notebook" / "shims" / "sitecustomize.py"
"""transformers imports torchvision, which a torch for the CPU cannot always load."""


def run_all(subject: str, way: str) -> dict[str, Numbers]:
    """The numbers of each project of a subject, "by_hand" or "with_loop". Runs on every rank."""
    runpy.run_path(str(SHIM))
    torch.set_default_dtype(torch.float64)
    projects = importlib.import_module(f"tests.dist.projects.{subject}").PROJECTS
    return {name: getattr(project, way)() for name, project in projects.items()}


def launch(num_ranks: int, subject: str, way: str) -> Any:
    """What every rank returned; an error of guard or watch ends it."""
    launcher = ddpilot.Launcher(nproc_per_node=num_ranks, timeout_s=LIMIT_S, preload=PRELOAD, on_finding="stop")
    return launcher.run(run_all, subject, way)


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference relative to the largest number of each tensor."""
    assert len(found) == len(expected)
    pairs = [(one, two) for one, two in zip(found, expected, strict=True) if two.numel()]
    return max(float((one - two).abs().max() / max(float(two.abs().max()), 1e-3)) for one, two in pairs)


@pytest.mark.timeout(4 * LIMIT_S)
@often("vision", "sampling", "losses", "optimizing")
@pytest.mark.parametrize("subject", SUBJECTS)
def test_projects_have_the_numbers_of_plain_pytorch_at_any_world_size(subject: str) -> None:
    """Losses of all batches, weights and buffers in float64, on every rank; and nothing is found."""
    (by_hand,) = launch(1, subject, "by_hand")
    for name, expected in by_hand.items():
        assert expected["losses"][-1] != expected["losses"][0], name
        assert all(value.isfinite().all() for values in expected.values() for value in values), name
    for num_ranks in WORLD_SIZES:
        for rank, found in enumerate(launch(num_ranks, subject, "with_loop")):
            for name, expected in by_hand.items():
                for key, values in expected.items():
                    assert difference(found[name][key], values) <= BAR, (name, key, f"rank {rank} of {num_ranks}")
