# SPDX-License-Identifier: Apache-2.0
"""Options are checked when they are said."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ddpilot.errors import LaunchError
from ddpilot.launching.options import LaunchOptions


@pytest.mark.parametrize("count", [1, 2, 64, "auto", "cpu", "gpu"])
def test_launch_options_take_a_number_of_ranks_or_a_word(count: int | str) -> None:
    """Numbers from 1 on and three words are meant."""
    assert LaunchOptions(nproc_per_node=count).nproc_per_node == count


@pytest.mark.parametrize("count", [0, -1, 1025, True, False, "2", "many", 2.0, None])
def test_launch_options_refuse_another_count_and_show_it(count: Any) -> None:
    """Everything else is refused with the value and what to give."""
    with pytest.raises(
        LaunchError, match=r"reading `nproc_per_node`: .*Give a number of ranks from 1 to 1024, or"
    ) as caught:
        LaunchOptions(nproc_per_node=count)
    assert repr(count) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"timeout_s": 0}, "reading `timeout_s`: 0. Give seconds, more than 0"),
        ({"timeout_s": float("nan")}, "reading `timeout_s`: nan"),
        ({"stop_grace_s": -1.0}, "reading `stop_grace_s`: -1.0"),
        ({"output": "loud"}, """reading `output`: 'loud'. Give one of "labelled", "rank_zero", "silent\""""),
        ({"start_method": "forkserver"}, "reading `start_method`: 'forkserver'"),
        ({"preload": "numpy"}, "Write `preload=('numpy',)`"),
        ({"env": {"A=B": "1"}}, "reading `env`: 'A=B': '1'"),
        ({"env": {"A": 1}}, "reading `env`: 'A': 1. Names and values are text"),
        ({"env": {"A": "1\0"}}, "without NUL"),
    ],
)
def test_launch_options_refuse_what_cannot_be_meant(options: dict[str, Any], text: str) -> None:
    """The error names the option, the value and what to give."""
    with pytest.raises(LaunchError) as caught:
        LaunchOptions(**options)
    assert text in str(caught.value)


def test_launch_options_cannot_be_changed() -> None:
    """What was checked stays as it was checked."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        LaunchOptions().nproc_per_node = 0  # type: ignore[misc]
