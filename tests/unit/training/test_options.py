# SPDX-License-Identifier: Apache-2.0
"""Options as dataclasses, dictionaries or keywords."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from ddpilot.data.options import LoaderOptions
from ddpilot.errors import LoopError
from ddpilot.training.models.ddp import DDPOptions
from ddpilot.training.options import CheckpointOptions, Interval, keywords_of

WEIGHTS = np.ones(4)


@pytest.mark.parametrize(
    ("options", "keywords"),
    [
        (None, {}),
        ({"comm": "bf16"}, {"comm": "bf16"}),
        (DDPOptions(), {}),
        (DDPOptions(comm="bf16", more={"init_sync": False}), {"comm": "bf16", "init_sync": False}),
        (CheckpointOptions(checkpoint_dir="runs", keep=None), {"checkpoint_dir": "runs", "keep": None}),
        (LoaderOptions(weights=WEIGHTS, shuffle=False), {"weights": WEIGHTS, "shuffle": False}),
    ],
)
def test_keywords_of_takes_what_differs_from_the_defaults(options: Any, keywords: dict[str, Any]) -> None:
    """Of a dataclass; all items of a dictionary."""
    assert keywords_of(options) == keywords


def parse(given: object, **options: Any) -> Interval:
    """As a function would."""
    return Interval.parse(given, did="testing", name="every", **options)


@pytest.mark.parametrize(
    ("given", "count", "unit"),
    [
        (500, 500, "updates"),
        ("500 updates", 500, "updates"),
        (" 1 update ", 1, "updates"),
        ("10_000 updates", 10_000, "updates"),
        ("1 epoch", 1, "epochs"),
        ("2  epochs", 2, "epochs"),
    ],
)
def test_parse_reads_numbers_and_texts(given: Any, count: int, unit: str) -> None:
    """Its text is read again as the same interval."""
    found = parse(given)
    assert (found.count, found.unit, found.counts_updates) == (count, unit, unit == "updates")
    assert parse(str(found)) == found
    assert parse(found) is found
    assert parse(3, unit="epochs") == Interval(3, "epochs")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("500 steps", "500 updates"),
        ("500updates", "500 updates"),
        ("500 updats", "500 updates"),
        ("500", "500 updates"),
        ("500 iterations", "500 updates"),
        ("100ba", "100 updates"),
        ("2ep", "2 epochs"),
        ("epoch", "1 epoch"),
        ("1 Epoch", "1 epoch"),
        ("1.0 epochs", "1 epoch"),
        (500.0, "500 updates"),
    ],
)
def test_other_spellings_are_answered_with_the_right_one(given: Any, meant: str) -> None:
    """The error names the argument and what was found."""
    with pytest.raises(LoopError, match=re.escape(f'testing: `every` is {given!r}. Did you mean "{meant}"?')):
        parse(given)


@pytest.mark.parametrize(
    "given", [0, -1, "0 updates", "-5 updates", 0.5, "0.5 epochs", True, None, "often", "5 minutes", ""]
)
def test_what_cannot_be_meant_is_answered_with_an_example(given: Any) -> None:
    """Without a guess."""
    with pytest.raises(LoopError, match=re.escape('Give a number of updates, 1 or more, or a text: "500 updates" or')):
        parse(given)


def test_an_interval_is_due_when_a_multiple_is_reached_or_passed() -> None:
    """Also if several updates are made at once."""
    every = Interval(5, "updates")
    assert [now for now in range(1, 16) if every.is_due(now - 1, now)] == [5, 10, 15]
    assert every.is_due(4, 6)
    assert not every.is_due(5, 9)
