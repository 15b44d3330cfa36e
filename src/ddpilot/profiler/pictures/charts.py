# SPDX-License-Identifier: Apache-2.0
"""Parts of pictures as HTML: legends, axes, stacked bars and line charts. They stretch with the window; text does not.

All have a text for screen readers, and values as tooltips.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy

from ddpilot.profiler.pictures.style import LEGEND, WHITE_TEXT, color_of

_LEAST_LABELLED = 0.02
"""Part of a bar's full width from which a segment has a label, which is shown if there is room for it."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart."""

    name: str
    color: str
    x: Sequence[float]
    y: Sequence[float]
    is_dashed: bool = False


def format_ms(seconds: float) -> str:
    """Return milliseconds with three digits, without an exponent."""
    return format_number(seconds * 1e3)


def format_number(value: float) -> str:
    """Return a number with three digits, without an exponent."""
    if value and abs(value) < 0.0995:
        return f"{value:.1g}" if abs(value) >= 0.00095 else f"{value:.0e}"
    digits = 2 if abs(value) < 9.95 else 1 if abs(value) < 99.5 else 0
    return f"{value:,.{digits}f}"


def make_ticks(most: float, num: int = 5) -> list[float]:
    """Return round numbers from 0 to at most `most`, about `num` of them."""
    if most <= 0:
        return [0.0]
    rough = most / num
    size = 10 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= 0.999 * rough)
    return [step * place for place in range(int(most / step + 1e-9) + 1)]


def format_tick(value: float, step: float) -> str:
    """Return the label of a tick, with the digits that the step between ticks needs."""
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}" if step else "0"


def figure(parts: Iterable[str], label: str, kind: str = "") -> str:
    """Return a picture with a text for screen readers."""
    classes = f' class="{kind}"' if kind else ""
    return f'<figure{classes} role="img" aria-label="{escape(label)}">{"".join(parts)}</figure>'


def legend(items: Iterable[tuple[str, str, str]], *, is_line: bool = False) -> str:
    """Return a legend: label, color, and tooltip of each."""
    kind = "key line" if is_line else "key"
    keys = (
        f'<li title="{escape(title)}"><i class="{kind}{" waiting" if "waiting" in name else ""}" '
        f'style="background-color:{color}"></i>{escape(name)}</li>'
        for name, color, title in items
    )
    return f'<ul class="legend">{"".join(keys)}</ul>'


def legend_of_shares(names: Iterable[str]) -> str:
    """Return the legend of shares of an update, with what each is."""
    return legend((name, color_of(name), LEGEND.get(name, name)) for name in names)


def stacked_bar(values: Sequence[tuple[str, float, str, str]], full: float) -> str:
    """Return a bar of segments, each with name, value, color and label; `full`: the value of the whole width."""
    parts = []
    for name, value, color, label in values:
        share = value / full if full else 0.0
        if share < 0.0005:
            continue
        classes = " ".join(filter(None, ("white" * (name in WHITE_TEXT), "waiting" * ("waiting" in name))))
        text = escape(label.split(" ")[0]) if share >= _LEAST_LABELLED else ""
        parts.append(
            f'<span class="{classes}" style="width:{share:.3%};background-color:{color}" '
            f'title="{escape(f"{name}: {label}")}">{text}</span>'
        )
    return f'<div class="bar">{"".join(parts)}</div>'


def row(name: str, content: str, total: str = "") -> str:
    """Return a row: its name, its picture, and a value behind it."""
    return f'<span class="name">{escape(name)}</span>{content}<span class="total">{escape(total)}</span>'


def axis(ticks: Sequence[tuple[float, str]]) -> str:
    """Return an axis: position (0 to 1) and label of each tick. The first and last one stay inside."""
    parts = []
    for place, label in ticks:
        kind = ' class="first"' if place < 0.02 else ' class="last"' if place > 0.96 else ""
        parts.append(f'<span{kind} style="left:{place:.2%}">{escape(label)}</span>')
    return f'<div class="axis">{"".join(parts)}</div>'


def value_axis(most: float, full: float, unit: str) -> str:
    """Return the axis from 0 to `most`, where the whole width is `full`."""
    ticks = make_ticks(most, 4)
    step = ticks[1] if len(ticks) > 1 else 1.0
    labels = [format_tick(value, step) for value in ticks]
    labels[-1] += f" {unit}"
    return axis([(value / full if full else 0.0, label) for value, label in zip(ticks, labels, strict=True)])


def line_chart(
    series: Sequence[Series],
    *,
    x_ticks: Sequence[tuple[float, str]],
    unit: str,
    label: str,
    most: float | None = None,
    x_name: str = "",
    more: str = "",
    num_ticks: int = 4,
    is_tall: bool = False,
) -> str:
    """Return a chart of lines from 0 on. `x` of series and `x_ticks` are positions from 0 to 1. `more`: HTML on top."""
    highest = max((float(numpy.max(each.y)) for each in series if len(each.y)), default=0.0) if most is None else most
    ticks = make_ticks(highest, num_ticks)
    step = ticks[1] if len(ticks) > 1 else 1.0
    top = highest * 1.05 or 1.0
    texts = [format_tick(value, step) for value in ticks]
    texts[-1] += f" {unit}"
    y_labels = "".join(
        f'<span style="bottom:{value / top:.2%}">{text}</span>' for value, text in zip(ticks, texts, strict=True)
    )
    grid = "".join(
        f'<line x1="0" x2="1000" y1="{1000 - 1000 * value / top:.1f}" y2="{1000 - 1000 * value / top:.1f}" '
        'stroke="currentColor" stroke-opacity=".16" vector-effect="non-scaling-stroke"/>'
        for value in ticks
    )
    lines = "".join(_polyline(each, top) for each in series)
    svg = f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{grid}{lines}</svg>'
    below = f'<div class="x">{x_name}</div>{axis(x_ticks)}'
    body = f'<div class="y">{y_labels}</div><div class="plot">{svg}{more}</div>{below}'
    return figure([body], label, "chart tall" if is_tall else "chart")


def _polyline(series: Series, top: float) -> str:
    points: Any = zip(series.x, series.y, strict=True)
    text = " ".join(f"{1000 * x:.1f},{1000 - 1000 * y / top:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="6 4"' if series.is_dashed else ""
    return (
        f'<polyline points="{text}" fill="none" stroke="{series.color}" stroke-width="1.8"{dashes} '
        f'stroke-linejoin="round" vector-effect="non-scaling-stroke"><title>{escape(series.name)}</title></polyline>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], feet: Sequence[Sequence[str]] = ()) -> str:
    """Return a table whose first column has names. `feet`: rows below the others."""

    def line(cells: Sequence[str], tag: str) -> str:
        others = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells[1:])
        return f'<tr><th scope="{"col" if tag == "th" else "row"}">{escape(cells[0])}</th>{others}</tr>'

    body = "".join(line(cells, "td") for cells in rows)
    end = f"<tfoot>{''.join(line(cells, 'td') for cells in feet)}</tfoot>" if feet else ""
    return f'<div class="wide"><table><thead>{line(head, "th")}</thead><tbody>{body}</tbody>{end}</table></div>'
