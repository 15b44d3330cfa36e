# SPDX-License-Identifier: Apache-2.0
"""Steps that end ranks, at their times."""

from __future__ import annotations

from ddpilot.launching.escalation import Escalation


def test_escalation_takes_the_steps_that_are_due_in_order() -> None:
    """A step may add steps, which are taken too if they are due."""
    steps, taken = Escalation(), list[str]()
    steps.start((5.0, lambda _: taken.append("kill")), (1.0, lambda now: steps.add(now, lambda _: taken.append("now"))))
    steps.add(2.0, lambda _: taken.append("terminate"))
    assert steps.due_s == 1.0
    steps.run_due(2.5)
    assert taken == ["terminate", "now"]
    steps.run_due(4.9)
    assert steps.due_s == 5.0
    steps.advance(1.0)
    steps.run_due(4.0)
    assert taken == ["terminate", "now", "kill"]
    steps.run_due(9.0)
    assert taken == ["terminate", "now", "kill"]


def test_escalation_discards_a_step_wherever_it_is() -> None:
    """Other steps keep their times."""
    steps = Escalation()
    taken: list[float] = []
    steps.start((1.0, print), (2.0, taken.append), (3.0, print))
    steps.discard(print)
    assert steps.due_s == 2.0
    steps.run_due(4.0)
    assert taken == [4.0]
