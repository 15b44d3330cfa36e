# SPDX-License-Identifier: Apache-2.0
"""Collectives of DistributedDataParallel are recorded by purpose: construction, buffers, buckets by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import BatchNorm1d, Linear, Module, Sequential
from torch.nn.parallel import DistributedDataParallel

from ddpilot.record.collectives.start_stop import start_recording
from ddpilot.record.flight_ring.log import Collective, RankLog
from tests.dist.record.ranks import matchable, my_rank, read_all, recorded, ring_of, run

WIDTH = 600
"""Large enough for several buckets: torch makes the first one end at 1 MB."""


def make_model() -> Sequential:
    """Three layers, two of them over a megabyte, and a buffer."""
    return Sequential(Linear(WIDTH, WIDTH), BatchNorm1d(WIDTH), Linear(WIDTH, WIDTH), Linear(WIDTH, 3))


def train(model: Module, num_steps: int) -> None:
    """Steps without an optimizer: the collectives are the same."""
    for _ in range(num_steps):
        model(torch.randn(4, WIDTH)).sum().backward()


def buckets(log: RankLog) -> list[list[tuple[int | None, tuple[str, ...]]]]:
    """Index and names of the gradient buckets of each backward."""
    steps: list[list[tuple[int | None, tuple[str, ...]]]] = []
    for entry in log.collectives:
        if entry.ddp and entry.ddp.what == "bucket":
            if entry.ddp.index == 0:
                steps.append([])
            steps[-1].append((entry.ddp.index, entry.ddp.names))
    return steps


def parts(log: RankLog) -> list[str]:
    """What of DDP's work the collectives are, neighbours that are alike as one."""
    found = [entry.ddp.what if entry.ddp else entry.op for entry in log.collectives]
    return [part for at, part in enumerate(found) if at == 0 or found[at - 1] != part]


def train_plainly(folder: Path, options: dict[str, Any]) -> None:
    """Three steps with a recorded model."""
    with recorded(folder):
        train(DistributedDataParallel(make_model(), bucket_cap_mb=1, **options), 3)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[RankLog]:
    """Both ranks' rings after three steps with several buckets."""
    folder = tmp_path_factory.mktemp("ddp")
    run(2, train_plainly, folder, {})
    return read_all(folder, 2)


def test_ddp_parts_are_told_apart(logs: list[RankLog]) -> None:
    """Construction, then buffers and buckets in turn; in the second forward the ranks agree on new buckets."""
    step = ["buffers", "bucket"]
    assert parts(logs[0]) == ["construction", *step, "bucket order", *step, *step]
    assert matchable(logs[0]) == matchable(logs[1])
    assert {log.first_fault for log in logs} == {""}


def test_ddp_buckets_are_named_as_torch_has_them(logs: list[RankLog]) -> None:
    """All parameters in one bucket at first, then in several, in the order in which gradients arrive."""
    everything = tuple(name for name, _ in make_model().named_parameters())
    first, *later = buckets(logs[0])
    assert first == [(0, everything)]
    for step in later:
        assert [index for index, _ in step] == [0, 1]
        assert step[0][1] == ("3.bias", "3.weight", "2.bias", "2.weight")
        assert sorted(step[0][1] + step[1][1]) == sorted(everything)
    sizes = {name: parameter.numel() for name, parameter in make_model().named_parameters()}
    for entry in logs[0].collectives:
        if entry.ddp and entry.ddp.what == "bucket":
            assert entry.num_bytes == 4 * sum(sizes[name] for name in entry.ddp.names)
            assert entry.ddp.num_parameters == len(entry.ddp.names)


def test_ddp_collectives_have_the_users_line(logs: list[RankLog]) -> None:
    """The line that wrapped the model, and the one that called it and its backward; never one of torch's."""
    lines = {entry.ddp.what: entry.line for entry in logs[0].collectives if entry.ddp and entry.line}
    assert all(line.file == __file__ for line in lines.values())
    assert "DistributedDataParallel(make_model()" in lines["construction"].text
    assert lines["bucket"].text == "model(torch.randn(4, WIDTH)).sum().backward()"
    assert lines["bucket"].function == "train"
    assert lines["bucket"].via.endswith("backward")


@pytest.mark.parametrize(
    "options", [{"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]
)
def test_ddp_buckets_are_named_with_every_kind_of_reducer(tmp_path: Path, options: dict[str, Any]) -> None:
    """Whatever way DDP reduces, each of its all_reduces is a bucket with names, or the map of unused parameters."""
    run(2, train_plainly, tmp_path, options)
    log, _ = read_all(tmp_path, 2)
    reduced = [entry for entry in log.collectives if entry.op == "all_reduce"]
    assert {entry.ddp.what for entry in reduced if entry.ddp} <= {"bucket", "unused parameters"}
    assert all(entry.ddp is not None for entry in reduced)
    names = sorted(name for step in buckets(log)[-1:] for _, names in step for name in names)
    assert names == sorted(name for name, _ in make_model().named_parameters())


def train_two_models(folder: Path) -> None:
    """As a GAN does; one of the models is there before the recording, so that nobody saw it being made."""
    dist.init_process_group("gloo")
    old = DistributedDataParallel(Sequential(Linear(WIDTH, 5)))
    with start_recording(ring_of(folder, my_rank()), rank=my_rank()):
        new = DistributedDataParallel(make_model())
        for _ in range(2):
            train(new, 1)
            train(old, 1)
            (old(torch.randn(2, WIDTH)).sum() + new(torch.randn(2, WIDTH)).sum()).backward()
    dist.destroy_process_group()


def test_ddp_buckets_belong_to_their_model_when_there_are_two(tmp_path: Path) -> None:
    """Each all_reduce is a bucket of the model with its parameters, also of one that was made before."""
    run(2, train_two_models, tmp_path)
    log, _ = read_all(tmp_path, 2)
    found: list[Collective] = [entry for entry in log.collectives if entry.op == "all_reduce"]
    named = [(entry.num_bytes, entry.ddp.what, len(entry.ddp.names)) for entry in found if entry.ddp]
    assert len(named) == len(found)
    assert {what for _, what, _ in named} == {"bucket"}
    of_old = {count for num_bytes, _, count in named if num_bytes == 4 * (WIDTH * 5 + 5)}
    assert of_old == {2}
