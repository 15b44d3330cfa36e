# SPDX-License-Identifier: Apache-2.0
"""Ranks that train without DDP and without a process group."""

from __future__ import annotations

import os

import torch

import ddpilot
from ddpilot.findings.finding import Finding
from tests.preload import PRELOAD

LIMIT_S = 60


def train(model: torch.nn.Module, *, seed: int | None) -> None:
    """A loop for one process."""
    torch.manual_seed(seed or 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.rand(4, 8)).square().mean().backward()
        optimizer.step()


def train_with_seeds() -> None:
    """Each rank has a model and a seed of its own."""
    torch.manual_seed(int(os.environ["RANK"]))
    train(torch.nn.Linear(8, 1), seed=int(os.environ["RANK"]))


def test_guard_reports_a_plain_loop_in_each_rank() -> None:
    """Each rank trains the caller's model in the same way; models with seeds of their own are intended."""
    found: list[Finding] = []
    launcher = ddpilot.Launcher(nproc_per_node=2, timeout_s=LIMIT_S, on_finding=found.append, preload=PRELOAD)
    launcher.run(train_with_seeds)
    assert found == []
    launcher.run(train, torch.nn.Linear(8, 1), seed=0)
    (finding,) = found
    assert (finding.code, finding.ranks) == ("DDP324", (0, 1))
    assert finding.place is not None
    assert finding.place.text == "optimizer.step()"
    assert finding.why.startswith("no rank has a process group")
