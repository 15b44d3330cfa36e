# SPDX-License-Identifier: Apache-2.0
"""DDP410: a loss or a metric is reduced over the ranks while it is part of the autograd graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpilot.findings.finding import Finding
from ddpilot.record.journal import Entry
from ddpilot.watch.rules.gathering import PATIENCE_NS, Waiting
from ddpilot.watch.rules.rule import RuleContext, place_of


class OnGraph:
    """Says what a probe noted: a backward through a collective, or a sum of losses of several steps with their graphs.

    What is reduced after its backward is nobody's loss any more; nothing is said of it.
    """

    codes: tuple[str, ...] = ("DDP410",)
    kinds: tuple[str, ...] = ("on_graph",)

    def __init__(self, context: RuleContext) -> None:
        self._waiting: Waiting[tuple[str, str, int], Any] = Waiting(context.world_size)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """What `rank` noted."""
        values = entry.values
        site = values.get("site") or {}
        key = (values["case"], site.get("file", ""), site.get("line", 0))
        self._waiting.put(key, rank, values, entry.time_ns)
        return ()

    def look(self, now_ns: int) -> Iterable[Finding]:
        """What can be said now."""
        for (case, _, _), by_rank in self._waiting.ready(now_ns):
            yield self._finding(case, tuple(by_rank), next(iter(by_rank.values())))

    def finish(self, now_ns: int) -> Iterable[Finding]:
        """What waits is said now."""
        return self.look(now_ns + PATIENCE_NS)

    def _finding(self, case: str, ranks: tuple[int, ...], values: Any) -> Finding:
        through = case == "backward"
        op = values["op"]
        return Finding(
            code=self.codes[0],
            name="graph-kept",
            severity="warning",
            summary=f"the backward goes through {op}, which has no gradient"
            if through
            else f"what {op} reduces holds the graphs of {values['losses']} steps",
            ranks=ranks,
            place=place_of(values.get("site")),
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
            source="ddpilot explain DDP410",
        )
