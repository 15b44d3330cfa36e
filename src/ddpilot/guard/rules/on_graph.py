# SPDX-License-Identifier: Apache-2.0
"""DDP410: a loss or a metric is reduced over the ranks while it is part of the autograd graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.guard.rules.rule import line_of, place_of
from ddpilot.guard.rules.waiting import WaitingRule
from ddpilot.record.journal import Entry


class OnGraph(WaitingRule):
    """Reports a backward through a collective, or a sum of losses that keeps the graphs of several steps.

    A value that is reduced after its backward is no longer used as a loss, and is not reported.
    """

    codes: tuple[str, ...] = ("DDP410",)
    kinds: tuple[str, ...] = ("on_graph",)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        values = entry.values
        self._waiting.put((values["case"], line_of(values.get("site"))), rank, values, entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, Any]) -> Finding:
        values = next(iter(by_rank.values()))
        through = values["case"] == "backward"
        op = values["op"]
        return make_finding(
            "DDP410",
            summary=f"the backward goes through {op}, which has no gradient"
            if through
            else f"what {op} reduces holds the graphs of at least {values['losses']} steps",
            ranks=tuple(by_rank),
            line=place_of(values.get("site")),
            evidence=(
                f"{op} changed a tensor of {values['numel']} element{'s' * (values['numel'] != 1)} that has a grad_fn"
                + (", and backward was called on it, or on what was made of it" if through else ""),
            ),
            why="torch's collectives change the value and are no part of the graph: the gradient is that of this "
            "rank's own value, not of what was reduced."
            if through
            else "Each loss that is added brings its graph, which stays in memory as long as the sum does.",
            fix="Call backward first, and reduce a copy: value = loss.detach().clone()."
            if through
            else "Add loss.detach(), or loss.item() where waiting for the device does not matter.",
        )
