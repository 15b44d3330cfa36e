# SPDX-License-Identifier: Apache-2.0
"""Invalid options of a loader: each error states the value and the correct option."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ddpilot import FakeGroup, Loop
from ddpilot.data.loaders import make_loader, make_stream_loader, prepare_data_loader
from ddpilot.data.options import DATA_LOADER_OPTIONS, LoaderOptions
from ddpilot.errors import DataError
from tests.unit.data.samples import Stream

DATA = TensorDataset(torch.arange(4))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 4}, "`batch_size=4`. Give `global_batch_size`, the samples of all ranks together"),
        ({"batch_sampler": [[0]]}, "Give a DataLoader that has it to loop.prepare_data_loader()"),
        ({"num_worker": 2}, "`num_worker=2`. Did you mean `num_workers`?"),
        ({"shufle": True}, "`shufle=True`. Did you mean `shuffle`?"),
        ({"weight": [1]}, "`weight=[1]`. Did you mean `weights`?"),
        ({"colour": 2}, "`colour=2`. There are global_batch_size, batch_size_per_rank, shuffle,"),
        ({"num_workers": "2"}, "`num_workers='2'`. Give a whole number."),
        ({"persistent_workers": True}, "`persistent_workers=True` without workers. Give `num_workers` of at least 1"),
        ({"timeout": 5}, "`timeout=5` without workers"),
        ({"global_batch_size": None, "batch_size_per_rank": -1}, "`batch_size_per_rank=-1`. Give at least 1."),
        ({"global_batch_size": 4.0}, "`global_batch_size=4.0`. Give a whole number."),
    ],
)
def test_make_loader_answers_options_that_it_does_not_have(options: dict[str, Any], text: str) -> None:
    """Options of a DataLoader that are ambiguous with several ranks, typos, and options that require workers."""
    with pytest.raises(DataError) as caught:
        make_loader(DATA, rank=1, world_size=2, **{"global_batch_size": 4, **options})
    assert text in str(caught.value)
    assert str(caught.value).startswith("[rank 1] making a loader")


@pytest.mark.parametrize("option", ["shuffle", "weights"])
def test_make_stream_loader_answers_options_of_datasets_with_numbers(option: str) -> None:
    """A stream has one order, and is read as a whole by each rank."""
    options: dict[str, Any] = {option: True}
    with pytest.raises(DataError, match=f"a loader of an iterable dataset: `{option}=True`"):
        make_stream_loader(Stream(4), rank=0, world_size=1, global_batch_size=2, **options)


def test_make_loader_sends_a_dataloader_to_shard() -> None:
    """And a generator to an IterableDataset."""
    with pytest.raises(DataError, match=r"Give its dataset, or the DataLoader itself to loop.prepare_data_loader\(\)"):
        make_loader(DataLoader(DATA), rank=0, world_size=1, global_batch_size=2)
    with pytest.raises(DataError, match="can only be iterated in an `IterableDataset`"):
        make_loader(iter(range(3)), rank=0, world_size=1, global_batch_size=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"global_batch_size": 4}, "The DataLoader's `batch_size` is that of all ranks"),
        ({"shuffle": True}, "`shuffle=True`. Pass it to the DataLoader"),
        ({"batch_splits": [1, 1]}, "`batch_splits=[1, 1]`. Did you mean `batch_split`?"),
    ],
)
def test_prepare_data_loader_answers_options_that_it_does_not_have(options: dict[str, Any], text: str) -> None:
    """Options that the DataLoader already has, and typos; a dataset is not a DataLoader."""
    with pytest.raises(DataError) as caught:
        prepare_data_loader(DataLoader(DATA, batch_size=2), rank=1, world_size=2, **options)
    assert text in str(caught.value)
    with pytest.raises(DataError, match=r"a TensorDataset. Give a torch DataLoader; a dataset goes to loop.loader\(\)"):
        prepare_data_loader(DATA, rank=1, world_size=2, **options)  # type: ignore[arg-type]


def test_loop_names_the_rank_in_what_its_loaders_refuse() -> None:
    """Also in errors of the plan, which does not know the rank."""
    loop = Loop(group=FakeGroup(rank=1, world_size=2))
    with pytest.raises(
        DataError, match=r"^\[rank 1\] dividing 4 samples among 2 ranks: `batch_split` is \[1, 0\]"
    ) as caught:
        loop.loader(DATA, global_batch_size=4, batch_split=[1, 0])
    assert caught.value.args == (str(caught.value),)
    with pytest.raises(DataError, match=r"^\[rank 1\] preparing a DataLoader: its `batch_size` is None"):
        loop.prepare_data_loader(DataLoader(DATA, batch_size=None))
    wrong = loop.prepare_data_loader(DataLoader(DATA, batch_size=2, sampler=[0, 1, 50]))
    with pytest.raises(DataError, match=r"^\[rank 1\] taking the order of epoch 0 from a sampler: sample 50 of 4"):
        next(loop.batches(wrong))


def test_docs_have_a_row_for_every_option() -> None:
    """And no others."""
    page = (Path(__file__).parents[3] / "docs" / "how_to" / "data.md").read_text()
    of_loader, of_data_loader = (
        page.split("## Options")[1].split("## Batch sizes")[0].split("Options of `loop.prepare_data_loader")
    )
    for text, names in (
        (of_loader, [field.name for field in fields(LoaderOptions)]),
        (of_data_loader, DATA_LOADER_OPTIONS),
    ):
        rows = [row.split("|")[1] for row in text.splitlines() if row.startswith("| `")]
        assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(names)


def test_a_stream_takes_shuffle_false_as_torch_does() -> None:
    """It says what is so anyway."""
    loader = Loop(group=FakeGroup()).loader(Stream(4), global_batch_size=2, shuffle=False)
    assert [batch.count for batch in loader.iterate(0, 0)] == [2, 2]
