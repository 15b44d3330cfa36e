# SPDX-License-Identifier: Apache-2.0
"""Batches of several loaders in one pass, and the losses of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from ddpilot.errors import DataError, LoopError
from ddpilot.group.protocol import FakeGroup
from ddpilot.training.combined import CombinedLoader
from ddpilot.training.loop import Loop
from ddpilot.training.resume.data_position import describe_data


class Stream(IterableDataset[Any]):
    """Numbers, of which there are as many as given; `told`: the length that it states, if any."""

    def __init__(self, num: int, told: int | None = None) -> None:
        self.num = num
        if told is not None:
            self.__class__ = type("Sized", (Stream,), {"__len__": lambda _: told})

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.num))


def make_loaders(loop: Loop, *lengths: int, **options: Any) -> list[Any]:
    """In batches of two."""
    return [loop.loader(TensorDataset(torch.arange(num)), global_batch_size=2, **options) for num in lengths]


def read(loader: CombinedLoader, epoch: int = 0, first: int = 0) -> list[Any]:
    """The samples of each batch."""
    return [
        tuple(part.sample_ids.tolist() for part in one.parts) or (one.source, one.sample_ids.tolist())
        for one in loader.iterate(epoch, first)
    ]


def test_batches_are_in_step_up_to_the_shortest_or_the_longest() -> None:
    """A repeated loader has a new order in each pass, and each epoch others."""
    loop = Loop(group=FakeGroup(), progress=False)
    loaders = make_loaders(loop, 6, 14)
    assert [len(one) for one in read(CombinedLoader(loaders, seed=0))] == [2] * 3
    assert [len(x) for (x,), _ in loop.batches(*loaders)] == [2] * 3
    shuffled = CombinedLoader(make_loaders(loop, 6, 14, shuffle=True), ends="longest", seed=0)
    assert len(shuffled) == 7
    firsts = [one for one, _ in read(shuffled)]
    passes = [[number for one in some for number in one] for some in (firsts[:3], firsts[3:6])]
    assert [sorted(one) for one in passes] == [list(range(6))] * 2
    assert passes[0] != passes[1]
    assert sorted(number for _, ids in read(shuffled) for number in ids) == list(range(14))
    assert read(shuffled, 1) != read(shuffled)


@pytest.mark.parametrize(
    "options", [{}, {"ends": "longest"}, {"weights": [1, 2]}, {"weights": [1, 9], "ends": "longest"}]
)
def test_pass_continues_at_any_batch(options: dict[str, Any]) -> None:
    """With the same samples as without a stop; the rest of an ended pass is empty."""
    loader = CombinedLoader(make_loaders(Loop(group=FakeGroup()), 6, 13, shuffle=True), seed=3, **options)
    whole = read(loader, 2)
    for first in range(len(whole) + 1):
        assert read(loader, 2, first) == whole[first:]


def test_weights_draw_a_loader_for_each_batch() -> None:
    """In proportion, up to the first or the last loader that is used up."""
    loop = Loop(group=FakeGroup(), progress=False)
    loaders = make_loaders(loop, 100, 400)
    sources = [source for source, _ in read(CombinedLoader(loaders, weights=[1, 3], seed=0))]
    assert max(sources.count(0) / 50, sources.count(1) / 200) == 1
    assert sources.count(1) / sources.count(0) == pytest.approx(3, rel=0.5)
    longest = read(CombinedLoader(loaders, weights=[1, 3], ends="longest", seed=0))
    for source, num in enumerate((100, 400)):
        assert {number for one, ids in longest if one == source for number in ids} == set(range(num))
    with pytest.raises(TypeError):
        len(CombinedLoader(loaders, weights=[1, 3], seed=0))
    seen = []
    for _ in loop.batches(*loaders, weights=[1, 3]):
        assert loop.batch is not None
        seen.append(loop.batch.source)
    assert seen == sources


def test_streams_end_the_pass_and_are_compared() -> None:
    """Without a length only for the shortest; a length that is wrong is reported."""
    loop = Loop(group=FakeGroup())
    stream = loop.loader(Stream(5), global_batch_size=2)
    combined = CombinedLoader([*make_loaders(loop, 20), stream], seed=0)
    assert combined.is_read_by_all
    assert len(read(combined)) == 3
    assert "dataset_length" not in describe_data(combined)
    with pytest.raises(TypeError):
        len(combined)
    short = loop.loader(Stream(4, told=6), global_batch_size=2)
    with pytest.raises(DataError, match="loader 1 ended after 2 batches, and its length is 3"):
        read(CombinedLoader([*make_loaders(loop, 20), short], ends="longest", seed=0))


def test_position_depends_on_each_loader_and_how_they_are_combined() -> None:
    """So that a run is not resumed with other batches."""
    loop = Loop(group=FakeGroup())
    loaders = make_loaders(loop, 6, 14)
    kinds: list[dict[str, Any]] = [{}, {"ends": "longest"}, {"weights": [1, 1]}, {"weights": [1, 2]}]
    facts = [describe_data(CombinedLoader(loaders, seed=0, **kind)) for kind in kinds]
    assert len({one["batches"] for one in facts}) == len(kinds)
    assert {one["dataset_length"] for one in facts} == {20}
    assert {one["global_batch_size"] for one in facts} == {4}


@pytest.mark.parametrize(
    ("num", "options", "message"),
    [
        (1, {"ends": "longest"}, "`ends` or `weights`, and one loader"),
        (2, {"ends": "long"}, "`ends` is 'long'. Use 'shortest' or 'longest'"),
        (2, {"weights": [1]}, r"`weights` is \[1\], for 2 loaders"),
        (2, {"weights": 3}, "`weights` is 3, for 2 loaders"),
        (2, {"weights": [1, 0]}, "`weights` has 0. Give finite numbers above 0"),
        (2, {"weights": [1, float("nan")]}, "`weights` has nan"),
    ],
)
def test_arguments_are_checked(num: int, options: dict[str, Any], message: str) -> None:
    """Before the first batch."""
    loop = Loop(group=FakeGroup())
    with pytest.raises(LoopError, match=message):
        next(iter(loop.batches(*make_loaders(loop, *[6] * num), **options)))


def test_loaders_are_checked() -> None:
    """Those that cannot be combined, and objects that are not loaders."""
    loop = Loop(group=FakeGroup())
    (one,) = make_loaders(loop, 6)
    joint = loop.loader(Stream(4), global_batch_size=2, divides_itself=True)
    cases: list[tuple[Any, str]] = [
        (one, "the same loader twice"),
        (joint, "divided by the dataset or by a sampler"),
        ([1, 2], "reading batches: a list, which is not a loader"),
        (make_loaders(loop, 0)[0], "loader 1 has no batch that could be repeated"),
        (loop.loader(Stream(4), global_batch_size=2), "loader 1 is of a dataset without a length"),
    ]
    for other, message in cases:
        with pytest.raises(LoopError, match=message):
            next(iter(loop.batches(one, other, ends="longest")))


def test_each_loss_belongs_to_a_loader() -> None:
    """A loss alone would be weighted by samples that it is not a mean over."""
    loop = Loop(group=FakeGroup(), progress=False)
    model = loop.prepare(nn.Linear(1, 1))
    loaders = make_loaders(loop, 6, 14)
    for (x,), (more,) in loop.batches(*loaders):
        losses = [model(one.float()[:, None]).mean() for one in (x, more)]
        with pytest.raises(LoopError, match=r"a loss without a count in a batch of 2 loaders.*backward\(\(loss_a"):
            loop.backward(losses[0])
        with pytest.raises(LoopError, match="1 losses in a tuple, and a batch of 2 loaders"):
            loop.backward((losses[0],))
        with pytest.raises(LoopError, match=r"no `count` in a batch of 2 loaders.*count=len\(x\)"):
            loop.reduce(losses[0])
        assert loop.reduce(losses[0], count=2).item() == pytest.approx(losses[0].item())
        loop.backward(losses)
    for (x,), (more,) in loop.batches(*make_loaders(loop, 4, 12)):
        scores = [model(one.float()[:, None]) * torch.ones(2) for one in (x, more)]
        targets = torch.tensor([0, -100]), torch.tensor([1, 0])
        with pytest.raises(LoopError, match="the loss 'loader 0' contains a cross entropy that ignores targets"):
            loop.backward([nn.functional.cross_entropy(*one) for one in zip(scores, targets, strict=True)])
        loop.backward([nn.functional.cross_entropy(one, targets[1]) for one in scores])
    for (x,) in loop.batches(loaders[0]):
        mean = model(x.float()[:, None]).mean()
        with pytest.raises(LoopError, match="2 losses in a tuple, and a batch of one loader"):
            loop.backward((mean, mean))
        loop.backward(mean)


def test_batch_norm_needs_two_samples_of_each_loader() -> None:
    """The program gets a batch of each and may run them one after the other: two samples together are not enough."""
    loop = Loop(group=FakeGroup(world_size=2), progress=False)
    loop.prepare(nn.BatchNorm1d(1))
    first = loop.loader(TensorDataset(torch.ones(64, 1)), global_batch_size=32)
    second = loop.loader(TensorDataset(torch.ones(64, 1)), global_batch_size=2)
    with pytest.raises(LoopError, match=r"batch 0 of loader 1 has 2 samples for 2 ranks \(1, 1\), and BatchNorm"):
        next(loop.batches(first, second))
    third = loop.loader(TensorDataset(torch.ones(64, 1)), global_batch_size=8)
    with pytest.warns(UserWarning, match=r"a global batch of loader 1 of 8 samples is divided into 4, 4"):
        next(loop.batches(first, third))
