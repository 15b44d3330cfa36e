# SPDX-License-Identifier: Apache-2.0
"""`Scaling`: the result of ``ddpilot scale``, as text, HTML or JSON. Does not import torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddpilot.findings.display import Findings, screen_size
from ddpilot.profiler.pictures.figures import plot_scaling
from ddpilot.profiler.pictures.profile_page import render_page
from ddpilot.profiler.pictures.scaling_page import render_scaling

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPECTED = {2: (0.90, 0.95), 4: (0.85, 0.95), 8: (0.80, 0.90), 16: (0.75, 0.90)}
"""Efficiencies that are usual on GPUs with a good link, by number of ranks."""
LEAST_SHOWN = 0.01


def expected_efficiency(num_ranks: int) -> tuple[float, float] | None:
    """Return the usual efficiency of `num_ranks` or the next number that is known; None for one rank."""
    if num_ranks < 2:
        return None
    return EXPECTED[min((each for each in EXPECTED if each >= num_ranks), default=max(EXPECTED))]


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
    update_s: float = 0.0
    """Duration of an update."""
    batch: float = 0.0
    """Samples of an update on each rank."""
    is_predicted: bool = False
    """True if the model predicts this row, and it was not measured; `spread` is then `samples_per_s` twice."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """How well the model, fitted to the other numbers of ranks, predicts the largest that was measured."""

    fitted: tuple[int, ...]
    num_ranks: int
    predicted_s: float
    measured_s: float
    is_fair: bool
    is_farther: bool = False
    """True if these ranks are on several nodes, and those that the model was fitted to on one."""

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1

    def __str__(self) -> str:
        sizes = " and ".join(map(str, self.fitted))
        return (
            f"check: fitted at {sizes} rank{'s' * (self.fitted != (1,))}, the model predicts "
            f"{self.predicted_s * 1e3:.3g} ms at {self.num_ranks} ranks, measured {self.measured_s * 1e3:.3g} ms: "
            f"{abs(self.error):.0%} off{self._reason()}"
        )

    def _reason(self) -> str:
        if self.is_farther:
            return " (there ranks are on several nodes, whose link it does not know)"
        return "" if self.is_fair else " (there ranks share cores, which it leaves out)"


@dataclass(frozen=True, kw_only=True, repr=False)
class Scaling:
    """The result of `ddpilot scale`. Displays itself in a terminal and in a notebook."""

    title: str
    kind: Literal["weak", "strong"]
    """"weak": every rank has as many samples of an update at any number of ranks; "strong": all together have."""
    rows: tuple[ScalingRow, ...]
    """Measurements, by number of ranks."""
    findings: Findings
    predicted: tuple[ScalingRow, ...] = ()
    """Predictions of the model for other numbers of ranks."""
    held_out: HeldOut | None = None
    """None if one number of ranks was measured."""
    notes: tuple[str, ...] = ()
    """Sentences about the model: the link that it assumes, and batches from which on more ranks help."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-serializable values."""
        held_out = None if self.held_out is None else {**asdict(self.held_out), "error": self.held_out.error}
        return {
            "title": self.title,
            "kind": self.kind,
            "rows": [asdict(row) for row in self.rows],
            "predicted": [asdict(row) for row in self.predicted],
            "held_out": held_out,
            "notes": list(self.notes),
            "findings": self.findings.to_list(),
        }

    def render(self, *, color: bool = False) -> str:
        """Return the text: a line for each number of ranks, what the model says, and the findings."""
        table = self._table()
        width, lines = screen_size()
        found = self.findings.render(width, color, height=max(10, lines - len(table) - 1))
        return "\n\n".join(filter(None, ["\n".join(table), found]))

    def _table(self) -> list[str]:
        head = "ranks  ms of an update  samples/s (spread)           speed-up  efficiency  usual     lost"
        lines = [f"{self.title}: {self.kind} scaling", head]
        lines += [_render_row(row) for row in (*self.rows, *self.predicted)]
        return lines + [str(each) for each in (self.held_out, *self.notes) if each is not None]

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
        return render_scaling(
            self.rows,
            headline=f"{self.title}: {self.kind} scaling",
            findings=self.findings._repr_html_() if self.findings else "",
            predicted=self.predicted,
            notes=[str(each) for each in (self.held_out, *self.notes) if each is not None],
        )


def _render_row(row: ScalingRow) -> str:
    low, high = row.spread
    speed = f"{row.samples_per_s:,.0f} " + ("(predicted)" if row.is_predicted else f"({low:,.0f} to {high:,.0f})")
    usual = expected_efficiency(row.num_ranks)
    text = f"{usual[0] * 100:.0f}-{usual[1]:.0%}" if usual else ""
    lost = sorted(((share, name) for name, share in row.lost.items() if share >= LEAST_SHOWN), reverse=True)
    return (
        f"{row.num_ranks:<5}  {row.update_s * 1e3:<15.4g}  {speed:<27}  {row.speed_up:<8.2f}  {row.efficiency:<10.0%}  "
        f"{text:<8}  {', '.join(f'{share:.0%} {name}' for share, name in lost)}"
        + ("" if row.is_fair else "  (ranks share cores)")
    ).rstrip()
