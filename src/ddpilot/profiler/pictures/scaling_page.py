# SPDX-License-Identifier: Apache-2.0
"""The pictures of `ddpilot scale` as HTML: the curve of speed-up with the ideal line, and what is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Protocol

from ddpilot.profiler.pictures.charts import (
    LINES,
    STYLE,
    UNKNOWN,
    Series,
    color_of,
    figure,
    format_number,
    legend,
    line_chart,
    row,
    stacked_bar,
    table,
)

KEPT = "as on the fewest ranks"
COLORS = {
    KEPT: color_of("optimizer"),
    "loader": color_of("data"),
    "copy to the device": color_of("copy"),
    "smaller batch per rank": color_of("forward"),
    "cores and memory shared on this machine": color_of("backward"),
    "stragglers and barriers": color_of("waiting"),
    "exposed communication": color_of("communication"),
    "inter-node link": LINES[-1],
    "checkpoints": color_of("checkpoint"),
    "evaluation": color_of("evaluation"),
    "waiting for the device": color_of("sync"),
    "other code": color_of("other"),
}
"""Colors, by cause of lost time."""


class Row(Protocol):
    """The program at one number of ranks, as in `ScalingRow`."""

    @property
    def num_ranks(self) -> int: ...
    @property
    def samples_per_s(self) -> float: ...
    @property
    def spread(self) -> tuple[float, float]: ...
    @property
    def speed_up(self) -> float: ...
    @property
    def efficiency(self) -> float: ...
    @property
    def lost(self) -> Mapping[str, float]: ...
    @property
    def is_fair(self) -> bool: ...


def render_scaling(
    rows: Sequence[Row], *, headline: str, findings: str, predicted: Sequence[Row] = (), notes: Sequence[str] = ()
) -> str:
    """Return everything about scaling as one ``<div>``, for a page or a notebook.

    `findings`: HTML. `predicted`: rows that a model predicts; `notes`: sentences about it.
    """
    said = "".join(f"<p>{escape(note)}</p>" for note in notes)
    parts = [
        f"<p><b>{escape(headline)}</b></p>{findings}",
        f"<section><h2>Speed-up</h2>{draw_curve(rows, predicted)}{said}</section>",
        f"<section><h2>Where the rest is lost</h2>{draw_losses([*rows, *predicted])}</section>",
        f"<section><h2>Samples per second</h2>{_draw_table(rows, predicted)}</section>",
    ]
    return f'<div class="ddpilot-profile"><style>{STYLE}</style>{"".join(parts)}</div>'


def ideal_of(row: Row, first: Row) -> float:
    """Return the speed-up of `row` if it were as efficient as `first`."""
    return row.num_ranks / first.num_ranks


def spread_of(row: Row, first: Row) -> tuple[float, float]:
    """Return the lowest and highest speed-up of the rounds."""
    return row.spread[0] / first.samples_per_s, row.spread[1] / first.samples_per_s


def draw_curve(rows: Sequence[Row], predicted: Sequence[Row] = ()) -> str:
    """Return speed-up by number of ranks, with the spread of the rounds, the ideal line, and what is predicted."""
    first = rows[0]
    every = sorted([*rows, *predicted], key=lambda each: each.num_ranks)
    last = every[-1]
    width = last.num_ranks - first.num_ranks or 1
    places = {each.num_ranks: 0.05 + 0.9 * (each.num_ranks - first.num_ranks) / width for each in every}
    ends = [first, last]
    series = [
        _line("ideal", UNKNOWN, ends, places, [ideal_of(each, first) for each in ends], is_dashed=True),
        _line("measured", LINES[0], rows, places, [each.speed_up for each in rows]),
    ]
    if predicted:
        joined = [rows[-1], *predicted]
        series.append(_line("predicted", LINES[1], joined, places, [each.speed_up for each in joined], is_dashed=True))
    most = max(ideal_of(last, first), *(spread_of(each, first)[1] for each in every))
    dots = [_draw_dot(each, first, places[each.num_ranks], most * 1.05, LINES[0]) for each in rows]
    dots += [_draw_dot(each, first, places[each.num_ranks], most * 1.05, LINES[1]) for each in predicted]
    label = "Speed-up by number of ranks: " + ", ".join(f"{each.num_ranks}: {each.speed_up:.2f}" for each in rows)
    chart = line_chart(
        series,
        x_ticks=[(place, str(num_ranks)) for num_ranks, place in places.items()],
        x_name="ranks",
        unit="x",
        label=label,
        most=most,
        num_ticks=8,
        more="".join(dots),
        is_tall=True,
    )
    titles = {"measured": "measured, with the spread of the rounds", "predicted": "predicted by the model"}
    keys = legend([(titles.get(each.name, each.name), each.color, each.name) for each in series], is_line=True)
    return f"{_say_unfair(rows)}{keys}{chart}"


def _line(
    name: str,
    color: str,
    rows: Sequence[Row],
    places: Mapping[int, float],
    values: Sequence[float],
    *,
    is_dashed: bool = False,
) -> Series:
    return Series(name=name, color=color, x=[places[each.num_ranks] for each in rows], y=values, is_dashed=is_dashed)


def _say_unfair(rows: Sequence[Row]) -> str:
    unfair = " and ".join(f"{each.num_ranks}" for each in rows if not each.is_fair)
    if not unfair:
        return ""
    return (
        f"<p>At {unfair} ranks several ranks share a core or a device here: they cannot be as fast as on a machine "
        "with one for each.</p>"
    )


def _draw_dot(row: Row, first: Row, place: float, top: float, color: str) -> str:
    low, high = spread_of(row, first)
    title = f"{row.num_ranks} ranks: {row.speed_up:.2f} times as fast ({low:.2f} to {high:.2f})"
    return (
        f'<span class="spread" style="left:{place:.2%};bottom:{low / top:.2%};height:{(high - low) / top:.2%};'
        f'background:{color}"></span>'
        f'<span class="dot" style="left:{place:.2%};bottom:{row.speed_up / top:.2%};background:{color}" '
        f'title="{escape(title)}"></span>'
    )


def draw_losses(rows: Sequence[Row]) -> str:
    """Return a bar for each number of ranks: the time of an update that is as on the fewest ranks, and the rest."""
    parts, names = [], {KEPT: 0.0}
    for each in rows:
        lost = {name: share for name, share in each.lost.items() if share >= 0.001}
        names |= lost
        kept = max(0.0, 1 - sum(lost.values()))
        values = [
            (name, share, COLORS.get(name, UNKNOWN), f"{share:.0%} {name}")
            for name, share in {KEPT: kept, **lost}.items()
        ]
        ranks = f"{each.num_ranks} rank{'s' * (each.num_ranks > 1)}"
        parts.append(row(ranks, stacked_bar(values, sum(value for _, value, *_ in values)), f"{each.efficiency:.0%}"))
    text = "The time of an update, and at the end the efficiency: speed-up divided by how many times as many ranks."
    label = "Time of an update by cause: " + "; ".join(
        f"{each.num_ranks} ranks lose "
        + (", ".join(f"{share:.0%} {name}" for name, share in each.lost.items() if share >= 0.01) or "nothing")
        for each in rows
    )
    keys = legend((name, COLORS.get(name, UNKNOWN), name) for name in names)
    return f"<p>{text}</p>{keys}{figure(parts, label, 'rows')}"


def _draw_table(rows: Sequence[Row], predicted: Sequence[Row]) -> str:
    head = ["ranks", "samples/s", "lowest", "highest", "speed-up", "efficiency"]
    body = [
        [
            f"{each.num_ranks}{' (predicted)' * (each in predicted)}",
            *(format_number(value) for value in (each.samples_per_s, *each.spread)),
            f"{each.speed_up:.2f}",
            f"{each.efficiency:.0%}",
        ]
        for each in (*rows, *predicted)
    ]
    return table(head, body)
