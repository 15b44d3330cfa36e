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


def mark_what_is_not_often(items: Collection[pytest.Item]) -> None:
    """Mark each case that `often` leaves to the soak."""
    for item in items:
        for mark in item.iter_markers("often"):
            if item.callspec.id not in mark.args:  # type: ignore[attr-defined]
                for one in SOAK:
                    item.add_marker(one)
