# SPDX-License-Identifier: Apache-2.0
"""Detect from bytecode that the result of a call is discarded."""

from __future__ import annotations

import dis
import sys
from types import CodeType
from typing import Any

import pytest

from ddpilot.guard.probes.collectives import drops_result


@pytest.mark.parametrize(
    ("source", "is_dropped"),
    [
        ("note(start(1))", False),
        ("start(1); note(1)", True),
        ("work = start(1)", True),
        ("work = start(1)\nprint = work.path", False),
        ("work = start(1)\ndef wait():\n    return work.path", False),
        ("works.append(start(1))", False),
        ("start(1).path", False),
        ("a, b = start(1), 2", False),
        ("def f():\n    work = start(1)\nf()", True),
        ("def f():\n    work = start(1)\n    return work\nf()", False),
        ("def f():\n    work = start(1)\n    def g():\n        return work\n    return g\nf()", False),
        ("def f():\n    work = start(1)\n    x = 1\n    return x, work\nf()", False),
        ("def f():\n    for x in [1]:\n        start(x)\nf()", True),
        ("def f():\n    return start(1)\nf()", False),
        ("[start(x) for x in [1]]", False),
    ],
)
def test_drops_result_sees_whether_anything_can_read_what_a_call_returns(source: str, is_dropped: bool) -> None:
    """By the instruction after the call, and by reads of the name that the result is assigned to."""
    places: list[tuple[Any, int]] = []

    def remember(*_: object) -> Any:
        frame = sys._getframe(1)
        places.append((frame.f_code, frame.f_lasti))
        return sys

    exec(compile(source, __file__, "exec"), {"start": remember, "works": [], "note": lambda _: None})
    ((code, at),) = places
    assert drops_result(code, at) is is_dropped


def test_a_name_that_a_cell_gives_may_be_read_in_a_later_one() -> None:
    """For the code of a cell, which is not in a file, only names in functions are known."""
    work = compile("work = start(1)", "<cell>", "exec")
    assert not drops_result(work, _call_in(work))
    inner = next(
        each for each in compile("def f():\n    work = start(1)", "<cell>", "exec").co_consts if each is not None
    )
    assert isinstance(inner, CodeType)
    assert drops_result(inner, _call_in(inner))


def _call_in(code: CodeType) -> int:
    return next(int(each.offset) for each in reversed([*dis.get_instructions(code)]) if each.opname.startswith("CALL"))
