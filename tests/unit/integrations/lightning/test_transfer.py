# SPDX-License-Identifier: Apache-2.0
"""Predictions of several ranks become those of one device."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from ddpilot.errors import LoopError
from ddpilot.integrations.lightning.transfer import Batch, join_batches, join_predictions


class Output(NamedTuple):
    """As a `predict_step` may return."""

    scores: torch.Tensor
    names: list[str]


def of_rank(rank: int, *, samples: int = 7, size: int = 2, num_ranks: int = 2) -> list[Batch]:
    """The batches of a rank that has every `num_ranks`-th sample."""
    mine = list(range(rank, samples, num_ranks))
    chunks = [mine[start : start + size] for start in range(0, len(mine), size)]
    return [Batch(chunk, Output(torch.tensor(chunk) * 10, [f"n{sample}" for sample in chunk])) for chunk in chunks]


def test_join_batches_gives_the_datasets_order_and_one_devices_batches() -> None:
    """Tensors by their first dimension, lists by item, inside the step's output."""
    joined = join_batches([*of_rank(0), *of_rank(1)])
    assert [type(output) for output in joined] == [Output] * 4
    assert [output.scores.tolist() for output in joined] == [[0, 10], [20, 30], [40, 50], [60]]
    assert [output.names for output in joined] == [["n0", "n1"], ["n2", "n3"], ["n4", "n5"], ["n6"]]


def test_join_batches_takes_a_sample_once_when_ranks_have_it_in_common() -> None:
    """Padding, or a sampler that gives every rank everything."""
    whole = [Batch([0, 1], {"x": torch.tensor([0, 1])}), Batch([2], {"x": torch.tensor([2])})]
    joined = join_batches([*whole, *whole])
    assert [output["x"].tolist() for output in joined] == [[0, 1], [2]]


def test_join_batches_keeps_whole_batches_when_an_output_has_no_rows() -> None:
    """A number per batch has no rows; batches are sorted by their first sample."""
    batches = [Batch([1, 3], "second"), Batch([0, 2], "first"), Batch([4], "third")]
    assert join_batches(batches) == ["first", "second", "third"]
    assert join_batches([Batch([0, 1], torch.tensor(1.0))]) == [torch.tensor(1.0)]
    widths = [torch.zeros(1, 3), torch.zeros(1, 4)]
    one_each = [Batch([at], rows) for at, rows in enumerate(widths)]
    assert [rows.shape for rows in join_batches([*one_each, *one_each])] == [(1, 3), (1, 4)]


def test_join_batches_changes_neither_dtype_nor_keys_of_other_batches() -> None:
    """Also if a later batch has more keys, or numbers of another dtype."""
    whole, half = torch.tensor([16777217, 3]), torch.tensor([0.5])
    joined = join_batches([Batch([0, 1], {"y": whole}), Batch([2], {"y": half, "aux": half})])
    assert [sorted(output) for output in joined] == [["y"], ["aux", "y"]]
    assert torch.equal(joined[0]["y"], whole)


def test_join_batches_refuses_rows_that_cannot_be_put_into_the_datasets_order() -> None:
    """Each batch is padded to its own width, and two ranks have read every other sample."""
    batches = [Batch([0, 2], torch.zeros(2, 3)), Batch([1, 3], torch.zeros(2, 4))]
    with pytest.raises(LoopError, match=r"joining predictions.*cannot be joined"):
        join_batches(batches)


def test_join_predictions_is_a_list_by_loader_when_there_are_several() -> None:
    """As Lightning returns them; one loader's batches are not wrapped."""
    one = join_predictions([[of_rank(0)], [of_rank(1)]])
    assert [output.names[0] for output in one] == ["n0", "n2", "n4", "n6"]
    two = join_predictions([[of_rank(0), of_rank(0)], [of_rank(1), of_rank(1)]])
    assert [[output.names[0] for output in loader] for loader in two] == [["n0", "n2", "n4", "n6"]] * 2


def test_join_predictions_is_none_when_a_rank_has_no_sample_indices() -> None:
    """An iterable dataset has no sample indices, so the order is unknown."""
    assert join_predictions([[of_rank(0)], None]) is None


def test_join_predictions_takes_ranks_without_a_batch() -> None:
    """Three ranks and two samples."""
    parts = [[of_rank(rank, samples=2, num_ranks=3)] for rank in range(3)]
    assert [output.names for output in join_predictions(parts)] == [["n0"], ["n1"]]
