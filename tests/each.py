# SPDX-License-Identifier: Apache-2.0
"""One test of many values, such as all pages: a case of its own takes pytest longer than most of these checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")


def for_each(
    values: Iterable[T], name: Callable[[T], object] = str
) -> Callable[[Callable[[T], None]], Callable[[], None]]:
    """Decorate a test of one argument: it is called with each value, and names those for which it fails."""
    kept = list(values)
    assert kept, "no values: the test would look at nothing"

    def decorate(test: Callable[[T], None]) -> Callable[[], None]:
        @functools.wraps(test)
        def test_each() -> None:
            failed: dict[str, BaseException] = {}
            for value in kept:
                try:
                    test(value)
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  # reported below, with the first one's traceback
                    failed[str(name(value))] = error
            if failed:
                texts = (f"{which}: {type(error).__name__}: {error}" for which, error in failed.items())
                raise AssertionError(f"of {len(kept)}, {len(failed)} failed:\n" + "\n".join(texts)) from next(
                    iter(failed.values())
                )

        test_each.__signature__ = inspect.Signature()  # type: ignore[attr-defined]  # pytest takes arguments for fixtures
        return test_each

    return decorate
