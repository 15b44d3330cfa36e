# SPDX-License-Identifier: Apache-2.0
"""Programs with mistakes in data, randomness, losses or checkpoints on two ranks, and correct ones that look alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ddpilot.findings.finding import Finding
from ddpilot.record.flight_ring.reader import read_ring
from tests.dist.guard import data_programs
from tests.dist.guard.data_programs import FAILING, RIGHT
from tests.dist.guard.running import run_all

EXPECTED = {program.__name__: code for code, programs in FAILING.items() for program in programs}
SEVERITIES = {"DDP401": "error", "DDP409": "error", "DDP412": "error"}
RANKS = {"divide_by_zero": (1,), "take_root_of_zero": (0,), "train_unequally": (1,)}
SAYS = {
    "divide_by_zero": ("backward 3, batch 3 of pass 1", "0.weight"),
    "take_root_of_zero": ("its gradient was not in backward 2, batch 2",),
    "train_unequally": ("rank 0: 6 batches", "rank 1: 5 batches"),
    "evaluate_padded": ("the first 1 come again",),
    "average_accuracies": ("of 7 samples", "of 13 samples", "the mean of these is 0.406593, that of all samples 0.4"),
    "mix_devices": ("on cpu: output", "on meta: target"),
    "sum_with_graphs": ("has a grad_fn",),
    "augment_alike_in_workers": ("numpy.random",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks write."""
    return tmp_path_factory.mktemp("guard")


@pytest.fixture(scope="module")
def found(folder: Path) -> Mapping[str, list[Finding]]:
    """The findings on every program, of one launch."""
    return run_all(folder, [*[program for each in FAILING.values() for program in each], *RIGHT])


@pytest.mark.parametrize("name", EXPECTED)
def test_guard_names_what_is_wrong(found: Mapping[str, list[Finding]], name: str) -> None:
    """One finding, with code, ranks, values, and a line of the program."""
    assert [finding.code for finding in found[name]] == [EXPECTED[name]]
    finding = found[name][0]
    assert finding.severity == SEVERITIES.get(finding.code, finding.severity)
    assert finding.ranks == RANKS.get(name, finding.ranks)
    assert finding.ranks
    assert finding.place is not None
    assert finding.place.file == data_programs.__file__
    for text in SAYS.get(name, ()):
        assert text in "\n".join(finding.evidence)


def test_what_guard_wraps_is_not_taken_for_what_was_called(found: Mapping[str, list[Finding]], folder: Path) -> None:
    """The ring has the user's lines, and the functions that they called."""
    log = read_ring(folder / "evaluate_padded-0.ring")
    called = {
        one.line.via for one in log.collectives if one.line is not None and one.line.file == data_programs.__file__
    }
    assert {name.rpartition(".")[2] for name in called} == {"__init__", "forward", "backward", "all_reduce"}


@pytest.mark.parametrize("name", [program.__name__ for program in RIGHT])
def test_guard_is_silent_about_right_programs(found: Mapping[str, list[Finding]], name: str) -> None:
    """They look like the wrong ones."""
    assert found[name] == []
