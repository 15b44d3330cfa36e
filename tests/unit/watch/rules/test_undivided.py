# SPDX-License-Identifier: Apache-2.0
"""When it is said that accumulated losses are not divided."""

from __future__ import annotations

from ddpilot.record.journal import Entry
from ddpilot.watch.rules.rule import RuleContext
from ddpilot.watch.rules.undivided import NUM_GROUPS, Undivided

SITE = {"file": "train.py", "line": 7, "text": "loss.backward()"}


def note(groups: int, index: int = 1, *, is_scaled: bool = False) -> Entry:
    """What a probe notes."""
    values = {"num": 4, "loss": "NllLossBackward0", "site": SITE, "step": SITE | {"line": 9}, "groups": groups}
    return Entry(index, index, "undivided", values | {"is_scaled": is_scaled})


def test_undivided_is_said_once_it_is_sure() -> None:
    """After 16 steps, of all ranks as one; after fewer only at the end."""
    rule = Undivided(RuleContext(world_size=2))
    for rank in (0, 1):
        assert not [*rule.feed(rank, note(2)), *rule.look(10**12)]
    for rank in (0, 1):
        rule.feed(rank, note(NUM_GROUPS))
    (finding,) = rule.look(2)
    assert finding.ranks == (0, 1)
    assert finding.severity == "warning"
    assert str(finding.place) == "train.py:7  loss.backward()"
    assert not [*rule.look(10**12), *rule.finish(10**12)]

    early = Undivided(RuleContext(world_size=2))
    for rank in (0, 1):
        early.feed(rank, note(2))
    (finding,) = early.finish(3)
    assert finding.ranks == (0, 1)


def test_undivided_is_not_said_when_a_rank_takes_it_back() -> None:
    """Whatever the other has noted by then."""
    rule = Undivided(RuleContext(world_size=2))
    rule.feed(0, note(2))
    rule.feed(1, note(2))
    rule.feed(1, note(0))
    assert not [*rule.look(10**12), *rule.finish(10**13)]


def test_undivided_says_where_to_divide_what_a_scaler_scales() -> None:
    """Before it does."""
    rule = Undivided(RuleContext(world_size=1))
    rule.feed(0, note(NUM_GROUPS, is_scaled=True))
    (finding,) = rule.look(2)
    assert finding.fix.startswith("Divide each loss: scaler.scale(loss / 4).backward().")
    assert "a mean, which nothing multiplies or divides, but a scale, as a GradScaler does" in finding.evidence[1]
    assert finding.evidence[2].endswith(", divided by that scale")
