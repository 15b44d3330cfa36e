# SPDX-License-Identifier: Apache-2.0
"""Files of shards without ranks: what is written is read, in whole or in part, and nothing in them is executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from ddpilot.checkpoint.atomic_files import SHARDS_FILE, read_facts
from ddpilot.checkpoint.shard_files import (
    ShardReader,
    TensorPath,
    finish_shards,
    join_plans,
    local_shards,
    plan_own,
    write_shards,
)
from ddpilot.errors import CorruptCheckpointError

TENSORS: dict[TensorPath, torch.Tensor] = {
    ("model", "layer.weight"): torch.arange(6.0).reshape(2, 3),
    ("model", "empty"): torch.ones(0, 2),
    ("optimizer", "state", "0", "exp_avg"): torch.full((2, 3), 0.5, dtype=torch.bfloat16),
}


def write(folder: Path) -> dict[str, object]:
    """Write `TENSORS` as the only rank, and return the facts of the files."""
    plan, metadata = join_plans([plan_own(TENSORS)], 0)
    files, results = write_shards(folder, plan, local_shards(TENSORS))
    return {**files, **finish_shards(folder, metadata, [results])}


def test_shards_are_read_as_they_were_written(tmp_path: Path) -> None:
    """By the rest of their paths; shapes and dtypes without reading; into a tensor of another dtype."""
    files = write(tmp_path)
    assert files == {path.name: read_facts(path) for path in tmp_path.iterdir()}
    reader = ShardReader(tmp_path)
    whole = reader.read_whole("model")
    assert set(whole) == {("layer.weight",), ("empty",)}
    assert torch.equal(whole["layer.weight",], TENSORS["model", "layer.weight"])
    outline = reader.outlines("optimizer", "state")["0", "exp_avg"]
    assert (outline.shape, outline.dtype, outline.is_meta) == ((2, 3), torch.bfloat16, True)
    target = torch.zeros(2, 3)
    reader.read_into({("optimizer", "state", "0", "exp_avg"): target})
    assert target.tolist() == [[0.5] * 3] * 2


class Call:
    """Would run a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("false",)


@pytest.mark.parametrize(
    ("data", "message"),
    [(pickle.dumps(Call()), r"would run posix.system"), (b"", "EOFError"), (pickle.dumps(3), "AttributeError")],
)
def test_an_index_with_code_or_without_contents_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    """Torch's own reader would execute it."""
    write(tmp_path)
    (tmp_path / SHARDS_FILE).write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=message):
        ShardReader(tmp_path)
