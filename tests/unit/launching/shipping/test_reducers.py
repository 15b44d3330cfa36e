# SPDX-License-Identifier: Apache-2.0
"""What pickle and cloudpickle lose."""

from __future__ import annotations

import functools
import json
import types

from ddpilot.launching.shipping import reducers


class OddError(Exception):
    """Takes other arguments than those it hands on."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.second = second


def test_reduce_exception_rebuilds_without_init() -> None:
    """The class, the arguments that it handed on, and its attributes come back."""
    error = OddError("a", "b")
    assert reducers.is_plain_exception(error)
    build, arguments, state = reducers.reduce_exception(error)
    again = build(*arguments)
    vars(again).update(state)
    assert (type(again), again.args, again.second) == (OddError, ("a",), "b")


def test_is_plain_exception_leaves_classes_with_a_reduce_of_their_own_alone() -> None:
    """OSError and ImportError know themselves how they travel."""
    assert not reducers.is_plain_exception(OSError(2, "no"))
    assert not reducers.is_plain_exception("text")


def test_owning_module_is_that_of_the_globals_whatever_wraps_says() -> None:
    """A wrapper from a module is the module's; a function of `__main__`, or of a namespace of its own, is not."""
    wrapper = types.FunctionType(json.dumps.__code__, json.dumps.__globals__)
    wrapper.__module__ = "__main__"
    own: dict[str, object] = {"__name__": "json"}
    exec("def free(): pass", own)
    assert reducers.owning_module(own["free"]) is None
    assert reducers.owning_module(wrapper) == "json"


def test_reduce_cached_keeps_size_and_kind() -> None:
    """The receiver's cache is empty, of the same size."""
    cached = functools.lru_cache(maxsize=7, typed=True)(len)
    build, arguments = reducers.reduce_cached(cached)
    assert build(*arguments).cache_parameters() == {"maxsize": 7, "typed": True}
