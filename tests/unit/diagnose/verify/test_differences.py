# SPDX-License-Identifier: Apache-2.0
"""Two recorded ranks are compared by size, scale, samples and content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy
import pytest

from ddpilot.diagnose.updates.record import (
    Batch,
    Parameter,
    RankRecord,
    RecordSpec,
    Update,
    arrays_path,
    parameters_path,
    updates_path,
)
from ddpilot.diagnose.verify.differences import (
    all_samples,
    are_same_batches,
    are_same_inputs,
    compare_update,
    content_by_sample,
    count_samples,
    largest,
)
from ddpilot.diagnose.verify.target import Run


def write_rank(folder: Path, rank: int, update: Update, arrays: Mapping[str, list[float]]) -> RankRecord:
    """Write one update, as the probe does; each array with its sum and norm."""
    folder.mkdir(exist_ok=True)
    with_sums = {
        f"0/{name}": numpy.array([*values, sum(values), numpy.linalg.norm(values)]) for name, values in arrays.items()
    }
    numpy.savez(arrays_path(folder, rank, 0), **with_sums)  # type: ignore[arg-type]
    updates_path(folder, rank).write_text(json.dumps(asdict(update)) + "\n")
    names = dict.fromkeys(key.partition("/")[0] for key in arrays)
    lines = [
        json.dumps(asdict(Parameter(key=f"0/{each}", name=f"layer{each}", shape=(2,), device="cpu", in_ddp=True)))
        for each in names
    ]
    parameters_path(folder, rank).write_text("\n".join(lines) + "\n")
    return RankRecord(folder, rank)


def update_of(*batches: Batch, inputs: tuple[int, ...] = ()) -> Update:
    """The first step of the first optimizer, with `batches`."""
    return Update(optimizer=0, number=0, site={}, batches=batches, inputs=inputs)


def run_of(folder: Path, *updates: Update) -> Run:
    """A run with one update on each rank."""
    ranks = tuple(write_rank(folder, rank, update, {}) for rank, update in enumerate(updates))
    return Run(nproc_per_node=len(updates), spec=RecordSpec(num_updates=1), ranks=ranks)


def test_difference_has_name_size_and_scale(tmp_path: Path) -> None:
    """One factor explains the gradient of the first parameter, not that of the second."""
    one = write_rank(tmp_path / "a", 0, update_of(), {"0/gradient": [1.0, -2.0], "1/gradient": [1.0, 0.5]})
    two = write_rank(tmp_path / "b", 0, update_of(), {"0/gradient": [2.0, -4.0], "1/gradient": [1.5, 0.0]})
    first, second = compare_update(one, two, 0)
    assert (first.kind, first.name, first.key) == ("gradient", "layer0", "0/0")
    assert first.size == pytest.approx(0.5)
    assert first.scale == pytest.approx(2.0)
    assert first.is_scaled
    assert not second.is_scaled
    assert largest([first, second], "gradient") == pytest.approx(0.5)
    assert largest([first, second], "before") == 0.0


def test_equal_and_tiny_tensors_are_no_difference(tmp_path: Path) -> None:
    """Rounding where everything should be zero is measured by the largest of all tensors."""
    one = write_rank(tmp_path / "a", 0, update_of(), {"0/after": [1.0, 3.0], "1/after": [1e-9, 0.0]})
    two = write_rank(tmp_path / "b", 0, update_of(), {"0/after": [1.0, 3.0], "1/after": [-1e-9, 0.0]})
    (only,) = compare_update(one, two, 0)
    assert only.name == "layer1"
    assert only.size < 1e-6


@pytest.mark.parametrize("other", [{}, {"0/gradient": [1.0, 2.0, 3.0]}, {"0/gradient": [float("nan"), 1.0]}])
def test_missing_or_non_finite_tensor_is_infinitely_different(other: dict[str, list[float]], tmp_path: Path) -> None:
    """A tensor that one side does not have, has in another shape, or with a NaN."""
    one = write_rank(tmp_path / "a", 0, update_of(), {"0/gradient": [1.0, 2.0]})
    two = write_rank(tmp_path / "b", 0, update_of(), other)
    (only,) = compare_update(one, two, 0)
    assert only.size == float("inf")
    assert not only.is_scaled


def test_nan_on_both_sides_is_equal(tmp_path: Path) -> None:
    """A program that computes NaN on one rank and on several is the same program."""
    one, two = (write_rank(tmp_path / name, 0, update_of(), {"0/after": [float("nan"), 1.0]}) for name in "ab")
    assert list(compare_update(one, two, 0)) == []


def test_samples_are_counted_by_rank_and_those_of_several_ranks_as_repeated(tmp_path: Path) -> None:
    """A sample twice on the same rank, as in two epochs, is not repeated."""
    run = run_of(tmp_path, update_of(Batch(loader=0, indices=(1, 2, 1))), update_of(Batch(loader=0, checksums=(2, 9))))
    assert count_samples(run, 0).by_rank == (3, 2)
    assert count_samples(run, 0).total == 5
    assert count_samples(run, 0).num_repeated == 1
    assert all_samples(run, 0) == {(0, 1): 2, (0, 2): 2, (0, 9): 1}
    assert not are_same_batches(run, 0)


def test_same_batches_in_another_order_are_the_same_and_inputs_are_compared(tmp_path: Path) -> None:
    """The loaders agree, but each rank passes its own part to the model."""
    batches = (Batch(loader=0, indices=(1, 2)), Batch(loader=0, indices=(2, 1)))
    run = run_of(tmp_path, update_of(batches[0], inputs=(5,)), update_of(batches[1], inputs=(6,)))
    assert are_same_batches(run, 0)
    assert not are_same_inputs(run, 0)
    assert not are_same_batches(run_of(tmp_path / "none", update_of(), update_of()), 0)


def test_content_is_that_of_the_first_rank_that_had_the_sample(tmp_path: Path) -> None:
    """By loader and index; samples without a checksum are left out."""
    run = run_of(
        tmp_path,
        update_of(Batch(loader=0, indices=(1, 2), checksums=(11, 12))),
        update_of(Batch(loader=0, indices=(2, 3), checksums=(99, 13)), Batch(loader=1, indices=(4,))),
    )
    assert content_by_sample(run, 1) == {(0, 1): 11, (0, 2): 12, (0, 3): 13}
