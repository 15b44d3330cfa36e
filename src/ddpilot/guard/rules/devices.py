# SPDX-License-Identifier: Apache-2.0
"""DDP118 and DDP412: several ranks on one device, and tensors of one rank on several devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.notes import DdpModelNote, DevicesNote
from ddpilot.guard.rules.rule import (
    BoundedDict,
    ByRank,
    Rule,
    RuleContext,
    WaitingRule,
    finding_at_line,
    ranks_of_model,
    some,
)
from ddpilot.record.journal import Entry


class OneDevice(Rule):
    """Reports ranks that hold replicas of one DDP model on the same accelerator of the same machine."""

    kinds = ("ddp_model",)

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._models: ByRank[int, DdpModelNote] = ByRank(64)
        self._judged: BoundedDict[int, None] = BoundedDict(64)

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        model = entry.values["model"]
        found = self._models.put(model, rank, entry.values)
        members = ranks_of_model(entry.values, self._context.world_size)
        if model in self._judged or len(members) < 2 or any(member not in found for member in members):
            return
        self._judged[model] = None
        by_device: dict[tuple[str, str], list[int]] = {}
        for member in members:
            if uuid := found[member]["uuid"]:
                by_device.setdefault((found[member]["host"], uuid), []).append(member)
        shared = {device: ranks for device, ranks in by_device.items() if len(ranks) > 1}
        if shared:
            yield self._finding(found, shared)

    def _finding(self, found: Mapping[int, DdpModelNote], shared: Mapping[tuple[str, str], list[int]]) -> Finding:
        ranks = sorted(rank for together in shared.values() for rank in together)
        first = found[ranks[0]]
        are_some_idle = first["num_devices"] > 1
        lines = [
            f"{render_ranks(together)} on {first['device']} of {host} ({uuid})"
            for (host, uuid), together in list(shared.items())[:4]
        ]
        return finding_at_line(
            "DDP118",
            {rank: found[rank] for rank in ranks},
            f"{render_ranks(ranks)} use the same device",
            *lines,
            f"a rank can see {first['num_devices']} device{'s' * are_some_idle}",
            severity="warning" if are_some_idle else "info",
            why="They share its memory and its time, and NCCL refuses to connect them."
            + (" The other devices are idle." if are_some_idle else ""),
        )


class SeveralDevices(WaitingRule[DevicesNote]):
    """Reports the names of tensors by device when an operation rejected them."""

    kinds = ("devices",)
    compares_ranks = False

    def _finding(self, by_rank: dict[int, DevicesNote]) -> Finding:
        note = next(iter(by_rank.values()))
        by_device = sorted(note["by_device"].items())
        return finding_at_line(
            "DDP412",
            by_rank,
            f"one operation got tensors on {some([device for device, _ in by_device])}",
            *(f"on {device}: {some(names, 8)}" for device, names in by_device),
            note["message"],
        )
