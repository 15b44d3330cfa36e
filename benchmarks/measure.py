# SPDX-License-Identifier: Apache-2.0
"""Run ours and the peer in turn, and say the medians, their spread, the ratio and whether the bar holds."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: what was measured, both sides and their ratio in words, the bar and whether it holds."""

    what: str
    ours: str
    peer: str
    ratio: str
    bar: str
    holds: bool


def alternate(ours: Callable[[], float], peer: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """Call each `rounds` times, in turn, so that what else the machine does hits both alike."""
    pairs = [(ours(), peer()) for _ in range(rounds)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def seconds(function: Callable[[], object]) -> float:
    """Wall-clock seconds that one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def render_values(values: Sequence[float], unit: str = "s") -> str:
    """Median and range, such as ``0.13 s (0.12-0.15)``."""
    digits = 3 if max(values) < 1 else 2 if max(values) < 10 else 0
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} {unit} ({low}-{high})"


def render_ratio(values: Sequence[float]) -> str:
    """Median of ratios that were taken round by round, with the quarters below and above it."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def render_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    head = ["what", "ddpilot", "peer", "ratio", "bar", "holds"]
    lines = [head, ["---"] * len(head)]
    lines += [[row.what, row.ours, row.peer, row.ratio, row.bar, "yes" if row.holds else "**NO**"] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(measure: Callable[[int], list[Row]], *, rounds: int, argv: Sequence[str] | None = None) -> int:
    """Command line of one script: `--rounds N`, `--json` for the joint table. Returns 1 when a bar does not hold."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"default {rounds}")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    rows = measure(options.rounds)
    print(json.dumps([asdict(row) for row in rows]) if options.json else render_table(rows))
    return 0 if all(row.holds for row in rows) else 1
