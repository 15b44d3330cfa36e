# SPDX-License-Identifier: Apache-2.0
"""Marks of tests that only `make soak` runs: they take long, and another test or case keeps their promise each time."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import pytest

T = TypeVar("T", bound=Callable[..., Any])

IS_SOAK = os.environ.get("DDPILOT_SOAK") == "1"
SOAK = (pytest.mark.soak, pytest.mark.skipif(not IS_SOAK, reason="takes long: run by `make soak`"))
"""For a case of a parametrized test: `pytest.param(..., marks=SOAK)`."""


def soak(test: T) -> T:
    """Mark a test."""
    for mark in SOAK:
        test = mark(test)
    return test


def often(*ids: str) -> pytest.MarkDecorator:
    """Of the cases of a parametrized test, only these, named as between its brackets, run in `make test`."""
    return pytest.mark.often(*ids)


def mark_what_is_not_often(items: Collection[pytest.Item], *, is_whole: bool) -> None:
    """Mark each case that `often` leaves to the soak; `is_whole`: all cases of a test are among `items`.

    Raises UsageError where `often` names a case that a test does not have.
    """
    named: dict[str, set[str]] = {}
    for item in items:
        for mark in item.iter_markers("often"):
            case = item.callspec.id  # type: ignore[attr-defined]
            named.setdefault(item.nodeid.partition("[")[0], set()).add(case)
            if case not in mark.args:
                for one in SOAK:
                    item.add_marker(one)
    for item in items if is_whole else ():
        test = item.nodeid.partition("[")[0]
        for mark in item.iter_markers("often"):
            if not named[test] & set(mark.args):
                raise pytest.UsageError(
                    f"{test} has no case {' or '.join(map(repr, mark.args))}: {sorted(named[test])}"
                )
