# SPDX-License-Identifier: Apache-2.0
"""The second source, hooks that process groups have from torch 2.14 on: the same records, where it can see as much."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel

from ddpilot.record.hooks import has_hooks
from ddpilot.record.recording import Source, start_recording
from tests.dist.record.ranks import my_rank, read_all, ring_of, run


def train_with(folder: Path, source: Source) -> str:
    """A group from before the recording, one from after; a DDP step; what comes after the end is not recorded."""
    dist.init_process_group("gloo")
    with start_recording(ring_of(folder, my_rank()), rank=my_rank(), source=source) as recording:
        dist.broadcast(torch.ones(3), 1)
        dist.barrier(group=dist.new_group([0, 1]))
        model = DistributedDataParallel(Linear(3, 1))
        model(torch.ones(2, 3)).sum().backward()
        if my_rank() == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.ones(4), 0)
    dist.all_reduce(torch.ones(9))
    dist.destroy_process_group()
    return recording.source


@pytest.mark.skipif(not has_hooks(), reason="this torch has no hooks on process groups; 2.14 is the first that does")
def test_hooks_record_what_kernels_record(tmp_path: Path) -> None:
    """Operations, numbers, shapes, roots, peers, lines and buckets are the same from both sources."""
    seen = []
    for source in ("kernels", "hooks"):
        folder = tmp_path / source
        folder.mkdir()
        assert list(run(2, train_with, folder, source)) == [source] * 2
        logs = read_all(folder, 2)
        assert [log.first_fault for log in logs] == ["", ""]
        seen.append(
            [
                (entry.op, entry.seq, entry.inputs, entry.root, entry.peer, entry.line, entry.ddp, entry.state)
                for log in logs
                for entry in log.collectives
            ]
        )
    assert seen[0] == seen[1]
    assert len(seen[0]) > 10


@pytest.mark.skipif(has_hooks(), reason="this torch has the hooks")
def test_recording_by_hooks_is_off_when_torch_has_none(tmp_path: Path) -> None:
    """Asked for by name, one line says that this torch has none, and the program runs on."""
    said: list[str] = []
    recording = start_recording(ring_of(tmp_path, 0), rank=0, source="hooks", tell=said.append)
    assert not recording.is_on
    assert "this torch has none, 2.14 is the first that does" in said[0]
    assert list(tmp_path.iterdir()) == []
