# SPDX-License-Identifier: Apache-2.0
"""Objects left over from a cell do not keep memory alive on the ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddpilot import RankError, Session

Start = Callable[..., Session]

WATCHED = """
import gc, weakref, torch
class Big:
    def __init__(self): self.data = torch.ones(1_000_000)
alive = []
def make():
    big = Big()
    big.me = big  # only the garbage collector finds it
    alive.append(weakref.ref(big))
    return big
"""


@pytest.mark.parametrize(
    "cell",
    [
        "def use(big): raise ValueError(big.data.sum())\ndef outer():\n    big = make()\n    use(big)\nouter()",
        (
            "def use():\n    big = make()\n    1 / 0\ntry:\n    use()\nexcept ZeroDivisionError as error:\n"
            "    raise RuntimeError('while handling') from error"
        ),
    ],
    ids=["frames", "chained"],
)
def test_a_failed_cell_keeps_no_tensor_alive(start: Start, cell: str) -> None:
    """Python and IPython store the last exception, whose frames hold tensors; ranks drop it."""
    session = start(2)
    session.execute(WATCHED)
    with pytest.raises(RankError):
        session.execute(cell)
    assert session.pull("[ref() for ref in alive]") == [[None], [None]]


def test_results_are_not_kept_as_out(start: Start) -> None:
    """`Out` would keep every tensor that a cell ended with; `_` has the last one."""
    session = start(2)
    session.execute(WATCHED)
    session.execute("make()")
    session.execute("'something else'")
    assert session.pull("[ref() for ref in alive]") == [[None], [None]]
