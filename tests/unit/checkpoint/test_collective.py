# SPDX-License-Identifier: Apache-2.0
"""`CollectiveCheckpoints` of one rank with shards: what is whole on disk, and a copy for which there is no memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddpilot.checkpoint.collective import CollectiveCheckpoints
from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.checkpoint.manifest import RunProgress
from ddpilot.errors import CheckpointError
from ddpilot.group.protocol import FakeGroup

SHARDS: dict[tuple[str, ...], torch.Tensor] = {
    ("model", "weight"): torch.arange(3.0),
    ("optimizer", "state", "0", "exp_avg"): torch.ones(3),
}
STATE: dict[str, Any] = {"optimizers": {"optimizer": {"state": {0: {"step": torch.tensor(4.0)}}, "param_groups": []}}}


def test_state_and_weights_are_whole_with_shards(tmp_path: Path) -> None:
    """Those of an optimizer next to what is not sharded of it; the error for an unknown name lists those in shards."""
    checkpoints = CollectiveCheckpoints(FakeGroup(), CheckpointDir(tmp_path))
    for step in (1, 2):
        checkpoints.save(RunProgress(step=step), weights={}, state=STATE, shards=SHARDS)
    assert checkpoints.wait()
    found = checkpoints.latest()
    assert found is not None
    assert found.manifest.progress.step == 2
    assert torch.equal(found.weights()["weight"], torch.arange(3.0))
    saved = found.state()["optimizers"]["optimizer"]["state"][0]
    assert {name: value.tolist() for name, value in saved.items()} == {"step": 4.0, "exp_avg": [1.0, 1.0, 1.0]}
    assert set(found.state_without_shards()["optimizers"]["optimizer"]["state"][0]) == {"step"}
    with pytest.raises(CheckpointError, match="it has weights for 'model'"):
        found.weights("critic")


def test_no_memory_for_the_copy_of_shards_is_reported_and_other_errors_are_raised(tmp_path: Path) -> None:
    """With the rank; the checkpoint before stays."""
    said: list[str] = []
    checkpoints = CollectiveCheckpoints(FakeGroup(), CheckpointDir(tmp_path, report=said.append))
    checkpoints.save(RunProgress(step=1), weights={}, shards=SHARDS)
    endless: dict[tuple[str, ...], torch.Tensor] = {("model", "weight"): torch.ones(1).expand(1 << 46)}
    checkpoints.save(RunProgress(step=2), weights={}, shards=endless)
    assert len(said) == 1
    assert "no memory for its copy" in said[0]
    assert "rank 0" in said[0]
    assert not checkpoints.wait()
    found = checkpoints.latest()
    assert found is not None
    assert found.manifest.progress.step == 1
    with pytest.raises(CheckpointError, match="copying the state to save"):
        checkpoints.save(RunProgress(step=3), weights={}, part={"made": object()}, shards=SHARDS)
