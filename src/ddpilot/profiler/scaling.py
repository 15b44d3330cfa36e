# SPDX-License-Identifier: Apache-2.0
"""`Scaling`: speed-up and efficiency of a program at several numbers of ranks, and where the rest is lost. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.display import Findings, screen_size
from ddpilot.profiler.phases import SHARES
from ddpilot.profiler.pictures.figures import plot_scaling
from ddpilot.profiler.pictures.profile_page import render_page
from ddpilot.profiler.pictures.scaling_page import render_scaling
from ddpilot.profiler.result import Profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EXPECTED = {2: (0.90, 0.95), 4: (0.85, 0.95), 8: (0.80, 0.90), 16: (0.75, 0.90)}
"""Efficiencies that are usual on GPUs with a good link, by number of ranks."""
_LEAST = 0.80
_LOSSES = {
    "data": "data",
    "copy": "copy to the device",
    "forward": "computation",
    "backward": "computation",
    "optimizer": "computation",
    "waiting": "waiting for the last rank",
    "communication": "exchange of gradients",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "sync": "waiting for the device",
    "other": "other code",
}


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """The program at one number of ranks."""

    num_ranks: int
    samples_per_s: float
    """Median over rounds."""
    spread: tuple[float, float]
    """Lowest and highest of the rounds."""
    speed_up: float
    """Samples per second, divided by those of the smallest number of ranks."""
    efficiency: float
    """`speed_up` divided by how many times as many ranks there are."""
    lost: dict[str, float]
    """Share of the time of an update by cause, in which more time is spent for a sample than on the fewest ranks."""
    is_fair: bool
    """False if the ranks share cores or a device, so that N ranks cannot be N times as fast."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Scaling:
    """The result of `ddpilot scale`. Displays itself in a terminal and in a notebook."""

    title: str
    kind: Literal["weak", "strong"]
    """"weak": every rank has as many samples of an update at any number of ranks; "strong": all together have."""
    rows: tuple[ScalingRow, ...]
    findings: Findings

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-serializable values."""
        rows = [asdict(row) for row in self.rows]
        return {
            "title": self.title,
            "kind": self.kind,
            "rows": rows,
            "findings": self.findings.to_list(),
        }

    def render(self, *, color: bool = False) -> str:
        """Return the text: a line for each number of ranks, and the findings."""
        table = self._table()
        width, lines = screen_size()
        found = self.findings.render(width, color, height=max(10, lines - len(table) - 1))
        return "\n\n".join(filter(None, ["\n".join(table), found]))

    def _table(self) -> list[str]:
        lines = [f"{self.title}: {self.kind} scaling", "ranks  samples/s (spread)           speed-up  efficiency  lost"]
        for row in self.rows:
            low, high = row.spread
            speed = f"{row.samples_per_s:,.0f} ({low:,.0f} to {high:,.0f})"
            lost = sorted(((share, name) for name, share in row.lost.items() if share >= 0.01), reverse=True)
            lines.append(
                f"{row.num_ranks:<5}  {speed:<28}  {row.speed_up:<8.2f}  {row.efficiency:<10.0%}  "
                + ", ".join(f"{share:.0%} {name}" for share, name in lost)
                + ("" if row.is_fair else "  (ranks share cores)")
            )
        return lines

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return f"Scaling({self.title!r})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(str(self))

    def to_html(self, path: str | Path) -> None:
        """Write the report with its pictures to `path`: one file, which needs no network."""
        Path(path).write_text(render_page(f"Scaling of {self.title}", self._repr_html_()), "utf-8")

    def plot(self) -> Figure:
        """Return a matplotlib figure: the curve with the ideal line, and what is lost at each number of ranks.

        Raises RecordError if matplotlib is not installed.
        """
        return plot_scaling(self.rows, f"{self.title}: {self.kind} scaling")

    def _repr_html_(self) -> str:
        found = self.findings._repr_html_() if self.findings else ""
        return render_scaling(self.rows, headline=f"{self.title}: {self.kind} scaling", findings=found)


def compare_sizes(title: str, by_size: Mapping[int, Sequence[Profile]]) -> Scaling:
    """Compare the rounds of each number of ranks. All need samples to count: a DataLoader.

    Time is compared by sample of a rank, so that it does not matter whether batches are those of a rank or of all.
    """
    first = min(by_size)
    base = _mean_shares(by_size[first])
    per_rank = {size: _samples_of_rank(rounds) for size, rounds in by_size.items()}
    kind: Literal["weak", "strong"] = "weak"
    if any(abs(per_rank[size] / per_rank[first] - 1) > 0.2 for size in by_size):
        kind = "strong"
    speed = {size: statistics.median(each.phases.samples_per_s for each in rounds) for size, rounds in by_size.items()}
    rows = []
    for size, rounds in sorted(by_size.items()):
        shares = _mean_shares(rounds)
        factor = per_rank[size] / per_rank[first]
        rows.append(
            ScalingRow(
                num_ranks=size,
                samples_per_s=speed[size],
                spread=(
                    min(each.phases.samples_per_s for each in rounds),
                    max(each.phases.samples_per_s for each in rounds),
                ),
                speed_up=speed[size] / speed[first],
                efficiency=speed[size] / speed[first] / (size / first),
                lost=_find_losses(shares, base, factor),
                is_fair=all(each.is_fair for each in rounds),
            )
        )
    return Scaling(
        title=title, kind=kind, rows=tuple(rows), findings=Findings(_judge(rows), more="`ddpilot scale --json`")
    )


def _mean_shares(rounds: Sequence[Profile]) -> dict[str, float]:
    """Mean seconds of an update by share, over rounds, updates and ranks."""
    return {name: statistics.fmean(float(each.phases.share(name).mean()) for each in rounds) for name in SHARES}


def _samples_of_rank(rounds: Sequence[Profile]) -> float:
    return statistics.fmean(float(each.phases.num_samples.mean()) for each in rounds)


def _find_losses(shares: dict[str, float], base: dict[str, float], factor: float) -> dict[str, float]:
    """Share of an update, by cause, beyond `factor` times the seconds of `base`."""
    total_s = sum(shares.values())
    found: dict[str, float] = {}
    for name, seconds in shares.items():
        found[_LOSSES[name]] = found.get(_LOSSES[name], 0.0) + (seconds - base[name] * factor) / total_s
    return {name: share for name, share in found.items() if share > 0}


def _judge(rows: Sequence[ScalingRow]) -> list[Any]:
    last = rows[-1]
    if len(rows) < 2 or last.efficiency >= _LEAST:
        return []
    causes = sorted(last.lost.items(), key=lambda item: -item[1])
    evidence = [f"{share:.0%} of an update: {name}" for name, share in causes if share >= 0.01]
    expected = _EXPECTED.get(last.num_ranks)
    if expected is not None:
        evidence.append(f"{expected[0]:.0%} to {expected[1]:.0%} are usual for {last.num_ranks} GPUs with a good link")
    if not last.is_fair:
        evidence.append("the ranks share cores or a device here: on a machine with one for each it may be different")
    return [
        make_finding(
            "DDP726",
            summary=f"{last.num_ranks} ranks are {last.speed_up:.2f} times as fast as {rows[0].num_ranks}: "
            f"an efficiency of {last.efficiency:.0%}",
            evidence=evidence,
            severity="warning" if last.is_fair else "info",
        )
    ]
