# SPDX-License-Identifier: Apache-2.0
"""Parts of pictures as HTML: colors, legends, axes, stacked bars and line charts. They stretch; text does not.

All have a text for screen readers, and values as tooltips.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy

COLORS = {
    "data": "#e69f00",
    "copy": "#a6761d",
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "waiting": "#c7c7c7",
    "communication": "#d55e00",
    "optimizer": "#009e73",
    "checkpoint": "#cc79a7",
    "evaluation": "#f0e442",
    "sync": "#b2abd2",
    "shadow": "#4d4d4d",
    "other": "#8a8a8a",
}
"""By share of an update: the palette of Okabe and Ito, whose colors also differ in lightness, and two greys."""
UNKNOWN = "#8a8a8a"
"""Color of a share that has none."""
WHITE_TEXT = frozenset({"forward", "shadow"})
"""Shares on which white text is readable; on all others black is."""
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a", "#a6761d")
"""Colors of lines, one for each rank."""
LATE = "#d55e00"
"""The color of lateness: the stronger, the later."""
LEGEND = {
    "data": "waiting for a DataLoader",
    "copy": "copying data to the device",
    "forward": "forward pass",
    "backward": "backward pass",
    "waiting": "in a collective, until the last rank comes",
    "communication": "in a collective, after that",
    "optimizer": "the optimizer's step",
    "checkpoint": "writing a checkpoint",
    "evaluation": "forward passes without gradients",
    "sync": "reading values of tensors, waiting for a device",
    "shadow": "without batches, matching the collectives of the others (Join)",
    "other": "code between these",
}
"""Description of each share in a few words."""
OVERLAPPED = "communication while backward computes, in parallel: not in the sum"
"""Description of overlapped communication, which is not a share of an update."""

# A label that has no room in its bar wraps behind the zero-width space before it, and the second line is hidden.
# Neither text nor lines have a color of their own, and nothing but bars a background: a notebook's theme decides.
STYLE = """
.ddpilot-profile { line-height: 1.45; max-width: 1000px; }
.ddpilot-profile h2 { font-size: 1.15em; line-height: 1.3; margin: 1.7em 0 .3em; }
.ddpilot-profile p { margin: .3em 0 .6em; max-width: 75ch; }
.ddpilot-profile .note { opacity: .8; font-size: .92em; }
.ddpilot-profile figure { margin: 0; padding: 0; }
.ddpilot-profile ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: .2em 0 .8em;
  padding: 0; font-size: .92em; }
.ddpilot-profile ul.legend li { margin: 0; white-space: nowrap; }
.ddpilot-profile .key { display: inline-block; width: .85em; height: .85em; margin-right: .4em; vertical-align: -.08em;
  box-shadow: inset 0 0 0 1px rgba(128, 128, 128, .55); }
.ddpilot-profile .key.line { height: 3px; vertical-align: .25em; width: 1.4em; box-shadow: none; }
.ddpilot-profile .rows { display: grid; grid-template-columns: max-content minmax(0, 1fr) max-content; gap: 4px 10px;
  align-items: center; }
.ddpilot-profile .rows > .name { white-space: nowrap; font-size: .92em; }
.ddpilot-profile .chart > .x { font-size: .85em; text-align: right; padding-top: 3px; }
.ddpilot-profile .rows > .total { white-space: nowrap; font-size: .92em; font-variant-numeric: tabular-nums; }
.ddpilot-profile .bar { display: flex; height: 26px; overflow: hidden; }
.ddpilot-profile .bar > span { flex: none; box-sizing: border-box; overflow: hidden; color: #000; font-size: 12px;
  line-height: 26px; text-align: center; border-right: 1px solid rgba(255, 255, 255, .6); }
.ddpilot-profile .track { position: relative; height: 26px; overflow: hidden; }
.ddpilot-profile .track > span { position: absolute; top: 0; bottom: 0; min-width: 1px; box-sizing: border-box;
  overflow: hidden; font-size: 12px; line-height: 26px; color: #000; text-align: center; }
.ddpilot-profile .bar > span, .ddpilot-profile .track > span { white-space: normal; overflow-wrap: normal;
  word-break: normal; }
.ddpilot-profile .bar > span::before, .ddpilot-profile .track > span::before { content: "\\200b"; }
.ddpilot-profile .track > .label { pointer-events: none; }
.ddpilot-profile .white { color: #fff !important; }
.ddpilot-profile .waiting { background-image: repeating-linear-gradient(135deg, rgba(0, 0, 0, .28) 0 1px,
  transparent 1px 6px); }
.ddpilot-profile .thin, .ddpilot-profile .thin .track { height: 8px; }
.ddpilot-profile .overlapped { background-image: repeating-linear-gradient(45deg, rgba(255, 255, 255, .6) 0 2px,
  transparent 2px 5px); }
.ddpilot-profile .axis { position: relative; height: 1.5em; font-size: .85em; border-top: 1px solid
  rgba(128, 128, 128, .6); }
.ddpilot-profile .axis > span { position: absolute; transform: translateX(-50%); white-space: nowrap; top: 2px; }
.ddpilot-profile .axis > span.first { transform: none; }
.ddpilot-profile .axis > span.last { transform: translateX(-100%); }
.ddpilot-profile svg { display: block; width: 100%; overflow: visible; }
.ddpilot-profile .heat svg { height: 100%; overflow: hidden; }
.ddpilot-profile .heat .track { box-shadow: inset 0 0 0 1px rgba(128, 128, 128, .3); }
.ddpilot-profile .dense { gap: 1px 10px; }
.ddpilot-profile .dense > .name, .ddpilot-profile .dense > .total { font-size: 11px; line-height: 13px; }
.ddpilot-profile .dense .bar, .ddpilot-profile .dense .track { height: 13px; }
.ddpilot-profile .dense .bar > span, .ddpilot-profile .dense .track > span { font-size: 0; }
.ddpilot-profile .together { white-space: nowrap; display: inline-block; }
.ddpilot-profile .scale { display: inline-block; width: 8em; height: .8em; margin: 0 .5em; vertical-align: -.05em;
  background: linear-gradient(90deg, transparent, LATE); box-shadow: inset 0 0 0 1px rgba(128, 128, 128, .55); }
.ddpilot-profile .chart { display: grid; grid-template-columns: max-content minmax(0, 1fr); column-gap: 8px; }
.ddpilot-profile .chart .y { position: relative; height: 150px; font-size: .85em; min-width: 4.6em; }
.ddpilot-profile .chart .y > span { position: absolute; right: 0; transform: translateY(50%); white-space: nowrap; }
.ddpilot-profile .chart .plot { position: relative; height: 150px; }
.ddpilot-profile .chart.tall .y, .ddpilot-profile .chart.tall .plot { height: 260px; }
.ddpilot-profile .chart svg { height: 100%; }
.ddpilot-profile .dot { position: absolute; width: 10px; height: 10px; margin: 0 0 -5px -5px; border-radius: 50%; }
.ddpilot-profile .spread { position: absolute; width: 2px; margin-left: -1px; }
.ddpilot-profile .wide { overflow-x: auto; }
.ddpilot-profile table { border-collapse: collapse; font-size: .92em; font-variant-numeric: tabular-nums; }
.ddpilot-profile th, .ddpilot-profile td { padding: 2px 12px 2px 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid rgba(128, 128, 128, .3); font-weight: normal; background: none; }
.ddpilot-profile th:first-child { text-align: left; }
.ddpilot-profile thead th, .ddpilot-profile tfoot th, .ddpilot-profile tfoot td { font-weight: 600; }
""".replace("LATE", LATE)

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.45 system-ui, sans-serif; margin: 24px auto; padding: 0 16px; max-width: 1000px;
  background: #fff; color: #1b1b1b; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.5em; line-height: 1.25; margin: 0 0 .3em; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #16181c; color: #e8e8e8; }} a {{ color: #8ab4f8; }} }}
</style></head><body><main>
<h1>{title}</h1>
{body}
</main></body></html>
"""


def color_of(name: str) -> str:
    """Return the color of a share."""
    return COLORS.get(name, UNKNOWN)


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
