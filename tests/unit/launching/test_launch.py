# SPDX-License-Identifier: Apache-2.0
"""Functions and processes for which a launch is refused before it starts anything."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from ddpilot.errors import LaunchError
from ddpilot.launching.launch import check_function, run_local
from ddpilot.launching.options import LaunchOptions


def generator() -> Iterator[int]:
    """Yields."""
    yield 1


async def coroutine() -> None:
    """Awaits."""


async def async_generator() -> AsyncIterator[int]:
    """Does both."""
    yield 1


class Trainer:
    """Is called in several ways."""

    def fit(self) -> None:
        """A method."""

    def steps(self) -> Iterator[int]:
        """A generator method."""
        yield 1

    def __call__(self) -> None: ...


class YieldingTrainer:
    """Calling it gives a generator."""

    def __call__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (generator, "generator function"),
        (functools.partial(functools.partial(generator)), "generator function"),
        (Trainer().steps, "generator function"),
        (YieldingTrainer(), "generator function"),
        (coroutine, "coroutine function"),
        (async_generator, "asynchronous generator function"),
    ],
)
def test_check_function_refuses_what_would_run_nothing(function: Any, kind: str) -> None:
    """Calling a generator or a coroutine function only creates an object; the error has the fix."""
    with pytest.raises(LaunchError, match=f"it is an? {kind}: calling it runs none of its code. Launch an ordinary"):
        check_function(function)


def test_check_function_refuses_what_cannot_be_called() -> None:
    """`launch(train())` instead of `launch(train)` is a common slip."""
    with pytest.raises(LaunchError, match=r"launching: None is not callable. Give a function and its arguments"):
        check_function(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (check_function, "check_function"),
        (functools.partial(check_function, print), "check_function"),
        (Trainer().fit, "Trainer.fit"),
        (Trainer(), "Trainer"),
        (Trainer, "Trainer"),
        (print, "print"),
        (lambda: "x", "<lambda>"),
    ],
)
def test_check_function_names_what_is_called(function: Any, name: str) -> None:
    """Functions, partials, methods, objects, classes and builtins have a name for messages."""
    assert check_function(function) == name


@pytest.mark.parametrize(
    ("environ", "who"),
    [
        ({"TORCHELASTIC_RUN_ID": "x", "DDPILOT_LAUNCH": "x"}, "ddpilot"),
        ({"TORCHELASTIC_RUN_ID": "y"}, "torchrun"),
        ({"TORCHELASTIC_RUN_ID": "y", "DDPILOT_LAUNCH": "x"}, "torchrun"),
    ],
)
def test_run_local_refuses_to_launch_inside_a_rank(
    environ: dict[str, str], who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names this rank and its launcher; `train` can be called directly there."""
    for name, value in {**environ, "RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as caught:
        run_local(LaunchOptions(), print, (), {})
    assert f"this process is itself rank 1 of 4 (started by {who}). Call `print` directly" in str(caught.value)
