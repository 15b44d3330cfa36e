# SPDX-License-Identifier: Apache-2.0
"""Detect ranks with overlapping parts of one dataset, as in cross-validation: each trains a model of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpilot.guard.rules.gathering import Gathering
from ddpilot.record.journal import Entry

MIN_TOGETHER = 1.1
"""Different parts overlap if their sizes add up to at least this multiple of the dataset's size.
Shards add up to the dataset's size plus a little padding.
"""


class OwnParts:
    """Examines the loaders that are read outside of evaluation, and which samples of their dataset they take."""

    kinds = ("loader_pass", "batch")

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._passes: Gathering[tuple[int, int], Mapping[str, Any]] = Gathering(64)
        self._read: Gathering[tuple[int, int], bool] = Gathering(64)
        self.overlap = False
        """True if the parts of the newest pass that all ranks have begun differ and are too large to be shards."""

    def feed(self, rank: int, entry: Entry) -> None:
        """Add what `rank` noted."""
        key = (entry.values["loader"], entry.values["pass"])
        if entry.kind == "loader_pass":
            self._passes.put(key, rank, entry.values)
        elif rank not in self._read.get(key) and len(self._read.put(key, rank, True)) == self._world_size:
            self.overlap = _overlap(self._passes.get(key))


def _overlap(passes: Mapping[int, Mapping[str, Any]]) -> bool:
    """True if different parts have more samples in total than their dataset, which shards never have."""
    if any(facts.get("share") is None or "replicas" in (facts["sampler"] or {}) for facts in passes.values()):
        return False
    wholes = {facts["share"][1] for facts in passes.values()}
    sizes = {facts["part"]: facts["share"][0] for facts in passes.values()}
    return len(wholes) == 1 and len(sizes) > 1 and sum(sizes.values()) >= MIN_TOGETHER * min(wholes)
