# SPDX-License-Identifier: Apache-2.0
"""Marks of tests that wait for Slurm most of their time, such as for its look at time limits twice a minute."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

T = TypeVar("T", bound=Callable[..., Any])

SOAK = (
    pytest.mark.soak,
    pytest.mark.skipif(os.environ.get("DDPILOT_SOAK") != "1", reason="waits for Slurm for long: run by `make soak`"),
)
"""For a case of a parametrized test: `pytest.param(..., marks=SOAK)`."""


def soak(test: T) -> T:
    """Mark a test."""
    for mark in SOAK:
        test = mark(test)
    return test
