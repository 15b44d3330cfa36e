# SPDX-License-Identifier: Apache-2.0
"""DDP222, DDP223, DDP410: a result used too early, a collective without effect on a rank, or one on the graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.rules.rule import WaitingRule, line_of, place_of
from ddpilot.record.journal import Entry


class NotAwaited(WaitingRule):
    """Reports asynchronous collectives whose work was discarded and whose tensor was used, as noted by a probe."""

    codes: tuple[str, ...] = ("DDP222",)
    kinds: tuple[str, ...] = ("not_awaited",)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        self._waiting.put(line_of(entry.values["site"]), rank, entry.values, entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, Any]) -> Finding:
        values = next(iter(by_rank.values()))
        used = "it was changed in place" if values["how"] == "changed" else "the optimizer took a step with it"
        return make_finding(
            "DDP222",
            summary=f"the result of an asynchronous {values['op']} is used, and nothing waits for it",
            ranks=tuple(by_rank),
            line=place_of(values["site"]),
            evidence=(
                "the line throws away the work that it gets, or nothing reads the name that it is given",
                f"{used}, a tensor of {values['numel']} elements, and no barrier came before that",
            ),
            why="With async_op=True the call returns before the values are there: what reads them gets the rank's own, "
            "or a part of the result, as it happens",
            fix=f"Keep the work, `work = dist.{values['op']}(..., async_op=True)`, and call `work.wait()` before the "
            "tensor is used; or leave async_op out",
        )


class NotMember(WaitingRule):
    """Reports collectives that torch skipped because this rank is not in their group, as noted by a probe."""

    codes: tuple[str, ...] = ("DDP223",)
    kinds: tuple[str, ...] = ("not_member",)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        self._waiting.put(line_of(entry.values["site"]), rank, entry.values, entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, Any]) -> Finding:
        values = next(iter(by_rank.values()))
        ranks = render_ranks(by_rank)
        return make_finding(
            "DDP223",
            summary=f"{values['op']} did nothing on {ranks}, which {'is' if len(by_rank) == 1 else 'are'} not in its "
            "group",
            ranks=tuple(by_rank),
            line=place_of(values["site"]),
            why="`dist.new_group(ranks)` has to be called on every rank, and gives those that are not among `ranks` a "
            "placeholder: a collective on it returns at once, and its tensor stays as it was",
            fix="Call it on the members only, `if dist.get_rank() in ranks:`; or give the group all ranks that need "
            "the result",
        )


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
