# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sharded parameters: each rank writes its shards, and any number of ranks, DDP and torch read them."""

from __future__ import annotations

import functools
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict_loader as dcp
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot import RankError, load_weights, merge_shards
from ddpilot.checkpoint import shard_files
from ddpilot.checkpoint.collective import CollectiveCheckpoints
from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.errors import CorruptCheckpointError
from ddpilot.group.init_group import init_group
from ddpilot.training.loop import Loop
from ddpilot.training.models.optimizers import full_state
from ddpilot.training.models.sharding import ParameterSharding
from tests.dist.training import bodies
from tests.dist.training.bodies import launch
from tests.soak import IS_SOAK

SMALL = ParameterSharding(min_parameters=20)
OFFLOADED = ParameterSharding(min_parameters=20, cpu_offload=True)


class Tied(nn.Module):
    """Tied and frozen parameters, one that is larger than three ranks divide evenly, one row, and two buffers."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.frozen = nn.Linear(6, 5)
        self.frozen.requires_grad_(False)
        self.hidden = nn.Linear(5, 6)
        self.scale = nn.Parameter(torch.ones(1, 6))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the next token."""
        self.count += 1
        return torch.as_tensor(self.head(torch.tanh(self.hidden(self.frozen(self.embedding(x)))) * self.scale))


def make() -> tuple[Tied, torch.optim.Optimizer]:
    """The model and an optimizer with two groups."""
    model = Tied()
    groups: list[dict[str, Any]] = [
        {"params": [model.scale], "lr": 0.05},
        {"params": [*model.hidden.parameters(), model.head.weight]},
    ]
    return model, torch.optim.AdamW(groups, lr=0.01)


def train(folder: str, shard: Any, num_epochs: int, fault: str = "", **options: Any) -> dict[str, Any]:
    """Train on; whole weights and states on rank 0. `fault`: what happens to rank 1 in the second epoch's save."""
    torch.set_default_dtype(torch.float64)
    loop = Loop(seed=4, checkpoint_dir=folder, progress=False, **options)
    model: Any
    optimizer: Any
    model, optimizer = loop.prepare(*make(), shard=shard)
    x = torch.arange(26) % 7
    loader = loop.loader(TensorDataset(x, (3 * x + 1) % 7), global_batch_size=5, shuffle=True)
    write: Any = shard_files.write_shards

    def write_badly(*args: Any) -> Any:
        if fault == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        try:
            written = write(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    for epoch in loop.epochs(num_epochs):
        is_faulty = fault and epoch == 1 and loop.rank == 1
        setattr(shard_files, "write_shards", write_badly if is_faulty else write)  # noqa: B010
        for inputs, targets in loop.batches(loader):
            loop.backward(nn.functional.cross_entropy(model(inputs), targets))
            loop.step(optimizer)
        loop.save({"epoch": epoch})
    setattr(shard_files, "write_shards", write)  # noqa: B010
    found = {"updates": loop.num_updates, "weights": full_state(model), "optimizer": full_state(optimizer)}
    return found if loop.rank == 0 else {}


def load_sharded(folder: str) -> dict[str, Any]:
    """Whole weights, on rank 0, of a new model into which `loop.load` has read the shards of a checkpoint."""
    torch.set_default_dtype(torch.float64)
    loop = Loop(seed=9, progress=False)
    model = loop.prepare(Tied(), shard=SMALL)
    loop.load(model, folder)
    return full_state(model)


assert_same = functools.partial(bodies.assert_same, but=("count", "params"))
"""Buffers count forward passes, which differ."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The results of one and of two epochs in one process."""
    return {num: launch(1, train, str(tmp_path_factory.mktemp("alone")), None, num)[0] for num in (1, 2)}


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of an epoch at three ranks."""
    folder = tmp_path_factory.mktemp("of_three")
    launch(3, train, str(folder), SMALL, 1)
    return folder


@pytest.mark.soak
def test_shards_of_three_ranks_go_on_at_any_number_in_ddp_and_offloaded(
    tmp_path: Path, of_three: Path, alone: dict[int, dict[str, Any]]
) -> None:
    """The second epoch at 2 ranks, in DDP, alone and with shards in CPU memory: that of a single process."""
    (saved,) = of_three.glob("save-*")
    files = {path.name for path in saved.iterdir()}
    assert files == {
        *(".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"),
        *("manifest.json", "rank-0.pt", "rank-1.pt", "rank-2.pt", "state.pt"),
    }, "nothing is left of how ranks wait for each other, and rank 0 writes no whole weights"
    ways = [(2, SMALL), (2, None), (1, SMALL), (3, OFFLOADED), *([(4, SMALL)] if IS_SOAK else [])]
    for number, (num_ranks, shard) in enumerate(ways):
        folder = tmp_path / str(number)
        shutil.copytree(of_three, folder)
        found = launch(num_ranks, train, str(folder), shard, 2)[0]
        assert_same(found, alone[2])
    assert_same(launch(2, load_sharded, str(of_three))[0], alone[1]["weights"])


def load_in_torch(folder: Path, to: Path) -> list[Any]:
    """Weights and optimizer states as a model and an optimizer of one process get them, each in another way."""
    torch.set_default_dtype(torch.float64)
    model, optimizer = make()
    load_weights(model, folder)
    found: list[Any] = [{name: value.clone() for name, value in model.state_dict().items()}]
    found.append(load_file(merge_shards(folder, to / "model.safetensors")))
    whole = torch.load(merge_shards(folder, to / "whole.pt"), weights_only=True)
    model.load_state_dict(whole["model"])
    optimizer.load_state_dict(whole["optimizer"])
    (saved,) = folder.glob("save-*")
    state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=saved, no_dist=True)
    return [*found, state["model"], model.state_dict(), optimizer.state_dict()]


def test_shards_load_into_plain_torch(tmp_path: Path, of_three: Path, alone: dict[int, dict[str, Any]]) -> None:
    """As they are, merged into one file of either kind, and by torch.distributed.checkpoint without ddpilot."""
    *weights, state = launch(1, load_in_torch, of_three, tmp_path)[0]
    for found in weights:
        assert_same(found, alone[1]["weights"])
    assert_same(state, alone[1]["optimizer"])


def test_a_missing_or_changed_file_of_shards_is_named_with_its_rank(tmp_path: Path, of_three: Path) -> None:
    """By the checksums, and where nobody looked at them, by what reads it."""
    folder = tmp_path / "damaged"
    shutil.copytree(of_three, folder)
    (saved,) = folder.glob("save-*")
    file = saved / "__1_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + b"!")
    with pytest.raises(CorruptCheckpointError, match=r"__1_0.distcp, the shards of rank 1, was changed"):
        CheckpointDir(folder).latest()
    found = CheckpointDir(folder).open(saved.name, verify=False)
    file.write_bytes(bytes(len(data)))
    with pytest.raises(CorruptCheckpointError, match=r"__1_0.distcp: the shards of rank 1 cannot be read"):
        found.weights()
    file.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"__1_0.distcp, the shards of rank 1, is missing"):
        CheckpointDir(folder).latest()


def test_a_full_disk_of_one_rank_is_reported_and_training_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the rank had written is deleted; the checkpoints before and after are whole."""
    found = launch(2, train, str(tmp_path), SMALL, 3, "limit")[0]
    assert [name.partition("-step")[0] for name in CheckpointDir(tmp_path).names()] == ["save-000002", "save-000001"]
    said = [line for line in capfd.readouterr().err.splitlines() if "no checkpoint was written" in line]
    assert len(said) == 1
    assert "rank 1: File too large" in said[0]
    assert "save-000001-step-6." in said[0]
    assert found["updates"] == 18
    assert sorted(path.name for path in tmp_path.iterdir() if "save" not in path.name) == [".writer", "latest"]


def test_a_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(
    tmp_path: Path, alone: dict[int, dict[str, Any]]
) -> None:
    """Its file is complete, and it has not told rank 0. The next run takes the first checkpoint and clears up."""
    with pytest.raises(RankError, match="SIGKILL"):
        launch(2, train, str(tmp_path), SMALL, 3, "kill")
    assert [name.partition("-step")[0] for name in CheckpointDir(tmp_path).names()] == ["save-000001"]
    assert_same(launch(3, train, str(tmp_path), SMALL, 2)[0], alone[2])
    assert not list(tmp_path.glob(".writing*"))


def train_elsewhere(folder: Path, num_epochs: int, gathers: bool) -> dict[str, Any]:
    """Train with a URL; `gathers`: as where ranks do not see the directory of rank 0."""
    can_share = CollectiveCheckpoints.can_share
    if gathers:
        CollectiveCheckpoints.can_share = lambda self: False  # type: ignore[method-assign]
    try:
        return train(f"file://{folder}/store", SMALL, num_epochs, staging_dir=folder / "staging", keep=1)
    finally:
        CollectiveCheckpoints.can_share = can_share  # type: ignore[method-assign]


def test_shards_are_uploaded_and_resumed_from_a_url(tmp_path: Path, alone: dict[int, dict[str, Any]]) -> None:
    """With no local copy left, at another number of ranks; where rank 0 has to gather, it writes whole weights."""
    launch(2, train_elsewhere, tmp_path, 1, False)
    assert (next((tmp_path / "store").glob("save-*")) / "__1_0.distcp").is_file()
    shutil.rmtree(tmp_path / "staging")
    found = launch(3, train_elsewhere, tmp_path, 2, True)[0]
    assert_same(found, alone[2])
    (saved,) = (tmp_path / "store").glob("save-*")
    assert (saved / "model.safetensors").is_file()
    assert not (saved / ".metadata").exists()


def share_or_not(folder: Path) -> list[bool]:
    """Whether ranks can write into a directory of rank 0; then, by another user on rank 1, into one that is closed."""
    group = init_group()
    found = []
    for name, is_closed in (("open", False), ("closed", True)):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
        if is_closed and group.rank == 1:
            os.seteuid(65534)
        found.append(CollectiveCheckpoints(group, CheckpointDir(folder / name)).can_share())
        os.seteuid(0)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_ranks_find_out_whether_all_can_write_where_rank_zero_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same on all ranks; those that cannot are named."""
    assert list(launch(2, share_or_not, tmp_path)) == [[True, False]] * 2
    said = [line for line in capfd.readouterr().err.splitlines() if "gathers the whole state" in line]
    assert len(said) == 1
    assert "rank 1 cannot write" in said[0]
    assert not list(tmp_path.rglob(".probe*"))
