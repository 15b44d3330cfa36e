# SPDX-License-Identifier: Apache-2.0
"""What cannot be pickled is named by its path."""

from __future__ import annotations

import functools
import resource
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ddpilot.errors import LaunchError, ShipError
from ddpilot.launching.shipping.unpicklable import find_unpicklable, ship

LOCK = threading.Lock()


class Loader:
    """Holds something that may not travel."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def load(self) -> None:
        """A method to be launched."""


class Slotted:
    """Keeps its value without a `__dict__`."""

    __slots__ = ("fn",)

    def __init__(self, fn: Any) -> None:
        self.fn = fn


def closing_over(value: Any) -> Callable[[], Any]:
    """A function that holds `value` in its closure."""
    return lambda: value


def with_default() -> Callable[[], Any]:
    """A function with a default value that may not be picklable."""

    def use(lock: Any = LOCK) -> Any:
        return lock

    return use


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ((LOCK,), "args[0]"),
        ((1, [2, LOCK]), "args[1][1]"),
        (({"a": 1, "loader": Loader(LOCK)},), "args[0]['loader'].fn"),
        ((Slotted(LOCK),), "args[0].fn"),
        ((functools.partial(print, LOCK),), "args[0].args[0]"),
        ((functools.partial(print, file=LOCK),), "args[0].keywords['file']"),
        ((Loader(LOCK).load,), "args[0].__self__.fn"),
        ((closing_over(LOCK),), "args[0].closure['value']"),
        ((closing_over(closing_over({"deep": LOCK})),), "args[0].closure['value'].closure['value']['deep']"),
        ((with_default(),), "args[0].__defaults__[0]"),
    ],
)
def test_ship_names_what_cannot_be_pickled_by_its_path(args: tuple[Any, ...], path: str) -> None:
    """The path leads through containers, attributes, slots, partials, bound methods, closures and defaults."""
    with pytest.raises(ShipError) as caught:
        ship("test", {"args": args}, args, did="starting 2 ranks", known=None)
    assert caught.value.path == path
    assert f"starting 2 ranks: `{path}` (_thread.lock) cannot be pickled: TypeError: cannot pickle" in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError)


def test_ship_says_that_a_generator_cannot_travel() -> None:
    """The hint is about values, not about pickling."""
    value = (number for number in range(3))
    with pytest.raises(ShipError, match=r"`result` \(builtins.generator\) cannot be pickled.*Return the values that"):
        ship("test", {"result": value}, value, did="sending", known=[])


def test_ship_names_an_object_whose_own_code_raises() -> None:
    """Pickling runs user code, and any exception of it is reported."""

    class Refuses:
        def __getstate__(self) -> dict[str, Any]:
            raise ZeroDivisionError("not today")

    with pytest.raises(ShipError, match="cannot be pickled: ZeroDivisionError: not today") as caught:
        ship("test", {"args": [Refuses()]}, [Refuses()], did="starting", known=None)
    assert caught.value.path == "args[0]"


def test_blame_ends_on_a_circle() -> None:
    """An object that holds itself is looked at once."""
    loader = Loader(None)
    loader.fn = [loader, LOCK]
    assert find_unpicklable({"args": (loader,)}, None) == ("args[0].fn[1]", LOCK)


def test_ship_says_of_a_result_what_to_return() -> None:
    """A result was made on the rank already; an argument can be made there."""
    with pytest.raises(ShipError, match=r"pickled.* Leave it out of what the function returns, or return numbers"):
        ship("result", {"result": LOCK}, LOCK, did="sending", known=None)
    with pytest.raises(ShipError, match=r"pickled.* Leave it out, or make it on each rank, inside the function$"):
        ship("call", {"args": (LOCK,)}, (LOCK,), did="starting", known=None)


def test_blame_ends_on_something_nested_too_deeply() -> None:
    """Ten thousand nested lists give the beginning of the path and the reason."""
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(ShipError, match="deep recursion") as caught:
        ship("test", {"args": (deep,)}, (deep,), did="starting", known=None)
    assert caught.value.path.startswith("args[0][0][0]")


def test_ship_does_not_blame_the_arguments_for_a_limit_of_the_system() -> None:
    """No descriptor is left for the memory file: nothing is wrong with what is shipped."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(LaunchError, match=r"starting 2 ranks: too many open files.*`ulimit -n`"):
            ship("call", {"args": (1,)}, (1,), did="starting 2 ranks", known=None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
