# SPDX-License-Identifier: Apache-2.0
"""How a program's flow can part, read from its text."""

from __future__ import annotations

import pytest

from ddpilot.source.control_flow import may_start_over
from ddpilot.source.parsed_file import Source

BEGUN_ANEW = {
    "a generator without end": "def forever(d):\n    while True:\n        yield from d  # HERE\n",
    "one that hands on each": "def f(d):\n    while True:\n        for b in d:  # HERE\n            yield b\n",
    "as many steps": "while step < n:\n    for b in d:  # HERE\n        if step == n:\n            break\n",
    "rounds without end": "for e in itertools.count():\n    for b in d:  # HERE\n        if x:\n            return\n",
    "held by hand": "it = iter(d)  # HERE\nfor i in range(9):\n    next(it)\n",
    "a circle": "for i, b in zip(range(9), cycle(d)):  # HERE\n    pass\n",
}
TO_ITS_END = {
    "epochs": "for e in range(2):\n    for b in d:  # HERE\n        step(b)\n",
    "epochs, by a condition": "while e < 2:\n    for b in d:  # HERE\n        step(b)\n    e += 1\n",
    "left outside": "while True:\n    for b in d:  # HERE\n        step(b)\n    if done:\n        break\n",
    "a generator with an end": "def f(d):\n    for b in d:  # HERE\n        yield b\n",
    "left from a loop inside": "while e < 2:\n    for b in d:  # HERE\n        for x in b:\n            break\n",
    "an iterator in the head": "for b in tqdm(iter(d)):  # HERE\n    step(b)\n",
}


def ask(text: str) -> bool:
    """Of the line that is marked."""
    line = next(at for at, one in enumerate(text.splitlines(), 1) if "HERE" in one)
    return may_start_over(Source(text), line)


@pytest.mark.parametrize("text", BEGUN_ANEW.values(), ids=BEGUN_ANEW)
def test_may_start_over_where_the_loop_takes_steps(text: str) -> None:
    """The end of what it goes over is not its own."""
    assert ask(text)


@pytest.mark.parametrize("text", TO_ITS_END.values(), ids=TO_ITS_END)
def test_may_start_over_is_false_where_the_loop_ends_with_what_it_goes_over(text: str) -> None:
    """Also where it is one of several epochs."""
    assert not ask(text)
