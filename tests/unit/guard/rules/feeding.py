# SPDX-License-Identifier: Apache-2.0
"""Feed rules with entries as ranks would note them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ddpilot.findings.finding import Finding
from ddpilot.guard.notes import NOTES
from ddpilot.guard.rules.rule import Rule, RuleContext, no_log
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.journal import Entry

SECOND = 1_000_000_000
Note = tuple[int, str, dict[str, Any]]
"""Rank, kind, values."""


def judge(
    make: type[Rule],
    notes: Iterable[Note],
    *,
    world_size: int = 2,
    log: Callable[[int], RankLog | None] = no_log,
    sources: Mapping[str, str] = MappingProxyType({}),
) -> list[Finding]:
    """The findings of the rule for `notes`, one millisecond apart, up to the end of the job; each once."""
    rule = make(RuleContext(world_size=world_size, log=log, sources=lambda: sources))
    found: list[Finding] = []
    now_ns = SECOND
    for rank, kind, values in notes:
        now_ns += SECOND // 1000
        assert kind in rule.kinds
        found += rule.feed(rank, make_entry(kind, values, now_ns))
        found += rule.look(now_ns)
    found += rule.finish(now_ns)
    return list({(each.code, each.ranks, each.place): each for each in reversed(found)}.values())[::-1]


_EMPTY = {"site": {}, "sizes": [], "batches": 0, "uuid": "", "num_devices": 0, "indices": ()}


def make_entry(kind: str, values: Mapping[str, Any], time_ns: int = SECOND) -> Entry:
    """An entry with the fields of its kind; those that are not given are empty."""
    note: Any = NOTES[kind]
    assert values.keys() <= note.__required_keys__ | note.__optional_keys__
    return Entry(1, time_ns, kind, {**{name: _EMPTY.get(name) for name in note.__required_keys__}, **values})


def model(ranks: Sequence[int] | None = None, **facts: Any) -> dict[str, Any]:
    """A DDP model of these ranks."""
    return {"model": 1, "ranks": ranks, "device": "cpu", "host": "here", **facts}


def loader_pass(number: int = 1, **facts: Any) -> dict[str, Any]:
    """A pass over the first loader."""
    sampler = {"kind": "DistributedSampler", "length": 8, "epoch": 0, "seed": 0, "shuffle": True, "drop_last": False}
    sampler |= {"has_set_epoch": True, "replicas": 2, "rank": 0, **facts.pop("sampler", {})}
    whole = {"loader": 1, "pass": number, "length": 4, "samples": 16, "dataset": "TensorDataset", "size": 2}
    return {**whole, "workers": 0, "sampler": sampler, "site": SITE, **facts}


SITE = {"file": "train.py", "line": 20, "function": "main", "text": "for x, y in loader:"}
