# SPDX-License-Identifier: Apache-2.0
"""The report of a profile as one HTML file: bars by rank, lateness by rank and update, durations of updates."""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy

from ddpilot.profiler.phases import SHARES, Phases
from ddpilot.profiler.result import Profile

_COLORS = {
    "data": "#e69f00",
    "copy": "#b07aa1",
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "waiting": "#bbbbbb",
    "communication": "#d55e00",
    "optimizer": "#009e73",
    "checkpoint": "#cc79a7",
    "evaluation": "#f0e442",
    "other": "#77777755",
}
"""Colors that people with any kind of color blindness can tell apart, on white and on black (Okabe and Ito)."""
_WIDTH, _ROW = 900, 26
_MAX_COLUMNS = 300
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 980px; margin: 24px auto; padding: 0 16px; }}
svg text {{ font: 12px system-ui, sans-serif; fill: currentColor; }}
h2 {{ font-size: 17px; margin: 26px 0 8px; }}
.legend span {{ margin-right: 14px; white-space: nowrap; }}
.legend i {{ display: inline-block; width: 12px; height: 12px; margin-right: 4px; vertical-align: -1px; }}
</style></head><body>
<h1 style="font-size:21px">{title}</h1><p>{summary}</p>
{findings}
<h2>An update on each rank, in ms (mean)</h2><p class="legend">{legend}</p>{bars}
<h2>How late each rank comes to the last collective of each update</h2>{heat}
<h2>Duration of each update, in ms</h2>{lines}
</body></html>
"""


def write_report(profile: Profile, path: Path, *, title: str) -> None:
    """Write the report to `path`. It needs no network, and follows the reader's light or dark theme."""
    phases = profile.phases
    findings = profile.findings._repr_html_() if profile.judged else "<p>Nothing to improve was found.</p>"
    page = _PAGE.format(
        title=escape(title),
        summary=escape(profile.summary),
        findings=findings,
        legend="".join(f'<span><i style="background:{color}"></i>{name}</span>' for name, color in _COLORS.items()),
        bars=_draw_bars(phases),
        heat=_draw_lateness(phases),
        lines=_draw_durations(phases),
    )
    path.write_text(page, "utf-8")


def _svg(height: int, parts: list[str], label: str) -> str:
    head = f'<svg viewBox="0 0 {_WIDTH} {height}" width="100%" role="img" aria-label="{escape(label)}">'
    return f"{head}{''.join(parts)}</svg>"


def _rank_label(rank: int, row: int) -> str:
    return f'<text x="0" y="{row * _ROW + 17}">rank {rank}</text>'


def _draw_bars(phases: Phases) -> str:
    means_ms = phases.seconds.mean(axis=1) * 1e3
    unit = (_WIDTH - 130) / means_ms.sum(axis=1).max()
    parts = []
    for row, (rank, shares) in enumerate(zip(phases.ranks, means_ms, strict=True)):
        parts.append(_rank_label(rank, row))
        x = 60.0
        for name, value in zip(SHARES, shares, strict=True):
            width = value * unit
            if width >= 0.05:
                parts.append(
                    f'<rect x="{x:.2f}" y="{row * _ROW + 3}" width="{width:.2f}" height="{_ROW - 6}" '
                    f'fill="{_COLORS[name]}"><title>{name}: {value:.3g} ms</title></rect>'
                )
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{row * _ROW + 17}">{shares.sum():.3g}</text>')
    return _svg(len(phases.ranks) * _ROW, parts, "phases of an update by rank")


def _draw_lateness(phases: Phases) -> str:
    late_ms = phases.arrivals_s * 1e3
    if numpy.isnan(late_ms).all():
        return "<p>The ranks called no collectives.</p>"
    columns = numpy.array_split(numpy.arange(late_ms.shape[1]), min(_MAX_COLUMNS, late_ms.shape[1]))
    most = max(float(numpy.nanmax(late_ms)), 1e-9)
    width = (_WIDTH - 60) / len(columns)
    parts = []
    for row, rank in enumerate(phases.ranks):
        parts.append(_rank_label(rank, row))
        for place, column in enumerate(columns):
            values = late_ms[row, column]
            value = 0.0 if numpy.isnan(values).all() else float(numpy.nanmean(values))
            first = phases.first_update + int(column[0])
            parts.append(
                f'<rect x="{60 + place * width:.2f}" y="{row * _ROW + 3}" width="{width + 0.2:.2f}" '
                f'height="{_ROW - 6}" fill="#d55e00" fill-opacity="{0.06 + 0.94 * value / most:.3f}">'
                f"<title>update {first}: {value:.3g} ms late</title></rect>"
            )
    parts.append(f'<text x="60" y="{len(phases.ranks) * _ROW + 16}">darkest: {most:.3g} ms</text>')
    return _svg(len(phases.ranks) * _ROW + 22, parts, "lateness by rank and update")


def _draw_durations(phases: Phases) -> str:
    durations = phases.durations_s.mean(axis=0) * 1e3
    most, height = float(durations.max()), 120
    x = numpy.linspace(60, _WIDTH - 10, len(durations))
    y = height - durations / most * (height - 10)
    points = " ".join(f"{one:.1f},{other:.1f}" for one, other in zip(x, y, strict=True))
    return _svg(
        height + 20,
        [
            f'<polyline points="{points}" fill="none" stroke="#0072b2" stroke-width="1.5"/>',
            f'<text x="0" y="14">{most:.3g}</text><text x="0" y="{height}">0</text>',
            f'<text x="60" y="{height + 16}">update {phases.first_update}</text>',
        ],
        "duration of each update",
    )
