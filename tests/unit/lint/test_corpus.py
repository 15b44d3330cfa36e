# SPDX-License-Identifier: Apache-2.0
"""Precision and recall over training scripts that are labelled by hand: ``# expect: DDP401`` on the lines of faults."""

from __future__ import annotations

from pathlib import Path

from tests.unit.lint.labels import expected_in, found_in

CORPUS = Path(__file__).parent / "corpus"
MIN_PRECISION, MIN_RECALL = 0.95, 0.90


def test_rules_find_the_labelled_faults_and_little_else() -> None:
    """At least 95 % of the reports are right, and 90 % of the faults are reported."""
    paths = sorted(CORPUS.glob("*.*"))
    wanted = {(path.name, *each) for path in paths for each in expected_in(path)}
    found = {(path.name, *each) for path in paths for each in found_in(path)}
    assert len(paths) >= 40
    assert len(wanted) >= 60
    precision, recall = len(found & wanted) / len(found), len(found & wanted) / len(wanted)
    assert (precision >= MIN_PRECISION, recall >= MIN_RECALL) == (True, True), (
        f"precision {precision:.3f}, recall {recall:.3f}\nwrong: {sorted(found - wanted)}\n"
        f"missed: {sorted(wanted - found)}"
    )


def test_programs_named_good_have_no_label_and_no_report() -> None:
    """A report on a right program costs more trust than a fault that is not found."""
    right = sorted(CORPUS.glob("good_*"))
    assert len(right) >= 15
    assert [(path.name, *each) for path in right for each in [*expected_in(path), *found_in(path)]] == []


def test_right_programs_of_this_repository_have_no_report() -> None:
    """The examples, and the controls of the zoo: right, uneven and unusual."""
    root = CORPUS.parents[3]
    paths = [*root.glob("tests/zoo/controls/*.py"), *root.glob("examples/*.py"), *root.glob("examples/*.ipynb")]
    assert len(paths) > 60
    assert [(path.name, *each) for path in paths for each in found_in(path)] == []
