# SPDX-License-Identifier: Apache-2.0
"""DDP118 and DDP412: several ranks on one device, and tensors of one rank on several devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.rules.rule import (
    BoundedDict,
    ByRank,
    ModelRanks,
    PromptRule,
    RuleContext,
    WaitingRule,
    line_of,
    place_of,
    some,
)
from ddpilot.record.journal import Entry


class OneDevice(PromptRule):
    """Reports ranks that hold parts of one DDP model on the same accelerator of the same machine."""

    codes: tuple[str, ...] = ("DDP118",)
    kinds: tuple[str, ...] = ("ddp_model",)

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._members = ModelRanks(context.world_size)
        self._models: ByRank[int, dict[str, Any]] = ByRank(64)
        self._judged: BoundedDict[int, None] = BoundedDict(64)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        values = entry.values
        found = self._models.put(values["model"], rank, dict(values))
        members = self._members.note(values)
        if values["model"] in self._judged or len(members) < 2 or any(member not in found for member in members):
            return
        self._judged[values["model"]] = None
        by_device: dict[tuple[str, str], list[int]] = {}
        for member in members:
            if found[member].get("uuid"):
                by_device.setdefault((found[member]["host"], found[member]["uuid"]), []).append(member)
        shared = {device: ranks for device, ranks in by_device.items() if len(ranks) > 1}
        if shared:
            yield self._finding(found, shared)

    def _finding(self, found: Mapping[int, Any], shared: Mapping[tuple[str, str], list[int]]) -> Finding:
        ranks = sorted(rank for together in shared.values() for rank in together)
        first = found[ranks[0]]
        idle = first["num_devices"] > 1
        lines = [
            f"{render_ranks(together)} on {first['device']} of {host} ({uuid})"
            for (host, uuid), together in list(shared.items())[:4]
        ]
        return make_finding(
            "DDP118",
            severity="warning" if idle else "info",
            summary=f"{render_ranks(ranks)} use the same device",
            ranks=tuple(ranks),
            line=place_of(first.get("site")),
            evidence=(*lines, f"a rank can see {first['num_devices']} device{'s' * idle}"),
            why="They share its memory and its time, and NCCL refuses to connect them."
            + (" The other devices are idle." if idle else ""),
            fix="Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the model is made, and use no fixed "
            "'cuda:0'; start as many ranks as there are devices.",
        )


class SeveralDevices(WaitingRule):
    """Reports the names of tensors by device when an operation rejected them."""

    codes: tuple[str, ...] = ("DDP412",)
    kinds: tuple[str, ...] = ("devices",)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        self._waiting.put(line_of(entry.values.get("site")), rank, entry.values, entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, Any]) -> Finding:
        values = next(iter(by_rank.values()))
        return make_finding(
            "DDP412",
            summary=f"tensors on {some(sorted(values['by_device']))} met in one operation",
            ranks=tuple(by_rank),
            line=place_of(values.get("site")),
            evidence=(
                *(f"on {device}: {some(names, 8)}" for device, names in sorted(values["by_device"].items())),
                values["message"],
            ),
            why="An operation takes tensors of one device, and never moves them by itself.",
            fix="Move what is on the wrong one: model.to(device) before DDP wraps it, and batch, target and what "
            "the loss holds (weights of classes) with .to(device).",
        )
