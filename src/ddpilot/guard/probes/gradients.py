# SPDX-License-Identifier: Apache-2.0
"""Whether a backward has changed the gradients of some parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Looks = tuple[Callable[[], Any], Callable[[Any], bool]]


def look_at_gradients(parameters: Sequence[Tensor]) -> Looks:
    """Two functions: one gives what the other compares with, to say whether gradients have changed since.

    They keep no reference to `parameters`. The compiled part of recording has the same.
    """
    references = [weakref.ref(parameter) for parameter in parameters]

    def state() -> list[tuple[int, int] | None]:
        found: list[tuple[int, int] | None] = []
        for reference in references:  # of every backward: a function or a comprehension would take as long as all else
            gradient = getattr(reference(), "grad", None)
            found.append(None if gradient is None else (gradient.data_ptr(), gradient._version))
        return found

    def has_changed_since(before: list[tuple[int, int] | None]) -> bool:
        for reference, one in zip(references, before, strict=True):  # the first one mostly tells
            gradient = getattr(reference(), "grad", None)
            if gradient is None:
                if one is not None:
                    return True
            elif one is None or one != (gradient.data_ptr(), gradient._version):
                return True
        return False

    return state, has_changed_since
