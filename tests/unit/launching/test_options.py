# SPDX-License-Identifier: Apache-2.0
"""Options are validated on construction."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

import ddpilot
from ddpilot.errors import LaunchError
from ddpilot.launching.options import LaunchOptions, check_keywords


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
    """`nproc_per_node` is not a parameter of the function."""
    with pytest.raises(LaunchError, match=r"Options go to the launcher: `Launcher\(nproc_per_node=2\)\.run\(\.\.\.\)`"):
        ddpilot.Launcher().run(train, nproc_per_node=2)


@pytest.mark.parametrize(
    ("args", "kwargs", "answer"),
    [
        ((2,), {}, "making a Launcher: `2` without a name. Write `nproc_per_node=2`"),
        ((), {"nproc_per_nod": 2}, "it has no option `nproc_per_nod`. Did you mean `nproc_per_node`?"),
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
    with pytest.raises(LaunchError, match="it has no option `nprocs`. Did you mean `nproc_per_node`?"):
        ddpilot.Session(nprocs=2)  # type: ignore[call-arg]


def test_keywords_that_may_be_right_pass() -> None:
    """A function that accepts any keyword, a wrapper (its own signature counts), and a callable without a signature."""

    @functools.wraps(train)
    def wrapped(*args: Any, nprocs: int = 1, **kwargs: Any) -> None:
        """Takes more than what it wraps."""

    for fn in (wrapped, dict, functools.partial(train, lr=1.0), print):
        check_keywords("fn", fn, {"lr": 1} if isinstance(fn, functools.partial) else {"end": 1}, lambda keyword: "")
    with pytest.raises(LaunchError, match="it has no parameter `end`"):
        check_keywords("fn", functools.partial(train, 1), {"end": 1}, lambda keyword: "")


@pytest.mark.parametrize("name", ["nodes", "nnodes", "gpus_per_node", "hosts"])
def test_several_nodes_are_not_silently_this_machine(name: str) -> None:
    """`launch` has `nodes`; for all else the error names what runs a function there."""
    given: dict[str, Any] = {name: 2}
    calls: list[Callable[[], object]] = [
        lambda: ddpilot.Launcher(**given),
        lambda: ddpilot.Launcher(nproc_per_node=1).run(train, **given),
    ]
    if name != "nodes":
        calls.append(lambda: ddpilot.launch(train, **given))
    for call in calls:
        with pytest.raises(
            LaunchError, match=rf"has no (option|parameter) `{name}`.*`ddpilot\.SlurmLauncher\(nodes=2\)`"
        ):
            call()
