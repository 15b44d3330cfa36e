# SPDX-License-Identifier: Apache-2.0
"""Detect whether a backward has changed the gradients of given parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Looks = tuple[Callable[[], Any], Callable[[Any], bool]]


def look_at_gradients(parameters: Sequence[Tensor]) -> Looks:
    """Return two functions: one returns a state, the other compares with it and returns True if gradients have changed.

    They keep no reference to `parameters`. The compiled recorder has the same function.
    """
    references = [weakref.ref(parameter) for parameter in parameters]

    def state() -> list[tuple[int, int] | None]:
        found: list[tuple[int, int] | None] = []
        for reference in references:  # runs in every backward: a function or comprehension would double its time
            gradient = getattr(reference(), "grad", None)
            found.append(None if gradient is None else (gradient.data_ptr(), gradient._version))
        return found

    def has_changed_since(before: list[tuple[int, int] | None]) -> bool:
        for reference, one in zip(references, before, strict=True):  # the first parameter mostly decides
            gradient = getattr(reference(), "grad", None)
            if gradient is None:
                if one is not None:
                    return True
            elif one is None or one != (gradient.data_ptr(), gradient._version):
                return True
        return False

    return state, has_changed_since
