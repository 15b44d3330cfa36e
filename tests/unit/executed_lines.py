# SPDX-License-Identifier: Apache-2.0
"""The cost of a call as a number of executed lines of Python: the same on every machine, however busy it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_executed_lines(call: Callable[[], object]) -> int:
    """Call `call` and return how many lines of Python it executed, those of the functions it calls included."""
    num_lines = 0

    def trace(_frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_lines
