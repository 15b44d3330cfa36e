# SPDX-License-Identifier: Apache-2.0
"""Names that others give to ddpilot's options, answered with the right one before any rank starts."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import ddpilot
from ddpilot import LaunchError
from ddpilot.launching.keywords import check_keywords


def train(epochs: int = 1, lr: float = 0.1) -> None:
    """A user's function."""


@pytest.mark.parametrize(
    ("kwargs", "answer"),
    [
        ({"num_processes": 2}, "it has no parameter `num_processes`. The number of ranks is `nproc_per_node=2`"),
        ({"nprocs": 2}, "The number of ranks is `nproc_per_node=2`"),
        ({"world_size": 2}, "The number of ranks is `nproc_per_node=2`"),
        ({"timeout_s": 5}, "Options go to the launcher: `Launcher(timeout_s=5).run(...)`"),
        ({"epoch": 3}, "Did you mean `epochs`?"),
        ({"depth": 3}, "Its parameters are epochs, lr"),
    ],
)
def test_launch_names_what_was_meant(kwargs: dict[str, Any], answer: str) -> None:
    """A keyword that the function does not take; nothing has started."""
    with pytest.raises(LaunchError) as caught:
        ddpilot.launch(train, **kwargs)
    assert str(caught.value).startswith("calling `train`: ")
    assert answer in str(caught.value)


def test_run_of_a_launcher_sends_its_options_to_the_launcher() -> None:
    """`nproc_per_node` is none of the function's there."""
    with pytest.raises(LaunchError, match=r"Options go to the launcher: `Launcher\(nproc_per_node=2\)\.run\(\.\.\.\)`"):
        ddpilot.Launcher().run(train, nproc_per_node=2)


@pytest.mark.parametrize(
    ("args", "kwargs", "answer"),
    [
        ((2,), {}, "making a Launcher: `2` without a name. Write `nproc_per_node=2`"),
        ((), {"nproc_per_nod": 2}, "`nproc_per_nod` is none of its options. Did you mean `nproc_per_node`?"),
        ((), {"num_processes": 2}, "Did you mean `nproc_per_node`?"),
        ((), {"zzz": 2}, "Its options are watch, guard, "),
    ],
)
def test_launcher_names_what_was_meant(args: tuple[Any, ...], kwargs: dict[str, Any], answer: str) -> None:
    """Instead of Python's TypeError."""
    with pytest.raises(LaunchError) as caught:
        ddpilot.Launcher(*args, **kwargs)
    assert answer in str(caught.value)


def test_session_names_what_was_meant() -> None:
    """Its first option may stand without a name, a second one may not."""
    with pytest.raises(LaunchError, match="making a Session: `1` without a name. Options have names: nproc_per_node"):
        ddpilot.Session(2, 1)  # type: ignore[arg-type, call-arg]
    with pytest.raises(LaunchError, match="`nprocs` is none of its options. Did you mean `nproc_per_node`?"):
        ddpilot.Session(nprocs=2)  # type: ignore[call-arg]


def test_keywords_that_may_be_right_pass() -> None:
    """A function that takes any, a wrapper whose own signature counts, and what has no signature."""

    @functools.wraps(train)
    def wrapped(*args: Any, nprocs: int = 1, **kwargs: Any) -> None:
        """Takes more than what it wraps."""

    for fn in (wrapped, dict, functools.partial(train, lr=1.0), print):
        check_keywords("fn", fn, {"lr": 1} if isinstance(fn, functools.partial) else {"end": 1}, lambda keyword: "")
    with pytest.raises(LaunchError, match="it has no parameter `end`"):
        check_keywords("fn", functools.partial(train, 1), {"end": 1}, lambda keyword: "")
