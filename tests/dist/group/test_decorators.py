# SPDX-License-Identifier: Apache-2.0
"""Decorated functions in a real group of two ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.group.ranks import RunRanks

RAISED_ELSEWHERE = "[rank 0] calling save(), which runs on rank 1: rank 1 raised {error}. See rank 1's traceback"
CASES: dict[str, tuple[tuple[Any, list[int]], tuple[Any, list[int]]]] = {
    "plain": (("abab", [0]), (None, [])),
    "broadcast": (([1, 1, 1], [0]), ([1, 1, 1], [1])),
    "nested": (("logged", [0]), (None, [])),
}


@pytest.mark.parametrize("case", list(CASES))
def test_decorated_function_runs_where_it_should(run_ranks: RunRanks, case: str) -> None:
    """It runs on its ranks with its arguments, and its value is where it was asked for."""
    for seen, (value, calls) in zip(
        run_ranks("decorating.decorated", 2, args=(case,)).results, CASES[case], strict=True
    ):
        assert (seen["value"], seen["calls"], seen["total"]) == (value, calls, 2.0)


@pytest.mark.parametrize(
    ("case", "own", "elsewhere"),
    [
        ("value_error", ["ValueError", "the disk is full"], "ValueError: the disk is full"),
        ("system_exit", ["SystemExit", "3"], "SystemExit: 3"),
        ("cannot_travel", ["_CannotTravelError", "odd"], None),
    ],
)
def test_decorated_function_raises_on_every_rank(
    run_ranks: RunRanks, case: str, own: list[str], elsewhere: str | None
) -> None:
    """The original on its own rank, its type, text and rank on the other; the group works on after it."""
    other, raising = run_ranks("decorating.decorated", 2, args=(case,)).results
    assert raising["value"] == [*own, None]
    kind, text, cause = other["value"]
    assert kind == "RemoteRankError"
    assert text.startswith(RAISED_ELSEWHERE.format(error=": ".join(own)))
    assert cause == elsewhere
    assert other["total"] == raising["total"] == 2.0


def test_decorated_function_raises_everywhere_when_its_value_cannot_be_pickled(run_ranks: RunRanks) -> None:
    """A value that cannot travel is an error on all ranks, not a wait on the ones that were to get it."""
    own, other = run_ranks("decorating.decorated", 2, args=("broadcast_what_cannot",)).results
    assert own["value"][0] == "TypeError"
    assert "pickle" in own["value"][1]
    assert "rank 0 raised TypeError: " in other["value"][1]


def test_decorated_function_is_refused_when_it_names_a_rank_that_does_not_exist(run_ranks: RunRanks) -> None:
    """Every rank raises before anything runs."""
    for seen in run_ranks("decorating.decorated", 2, args=("no_such_rank",)).results:
        assert seen["value"][:1] == ["GroupError"]
        assert "rank 7 does not exist: the group has ranks 0 to 1" in seen["value"][1]
        assert (seen["calls"], seen["total"]) == ([], 2.0)
