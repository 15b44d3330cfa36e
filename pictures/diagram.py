# SPDX-License-Identifier: Apache-2.0
"""The picture of the processes of a session, drawn from a list of boxes and arrows."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from pictures.files import Scheme, for_each_scheme


class Box(NamedTuple):
    """A process. `left`, `top`, `width`, `height` in pixels; `lines`: its name and what it does."""

    left: int
    top: int
    width: int
    height: int
    lines: tuple[str, ...]
    is_rank: bool = False


class Arrow(NamedTuple):
    """An arrow between two points, with a text beside its middle. `is_dashed`: data that is read, not sent."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str = ""
    is_dashed: bool = False


WIDTH, HEIGHT = 860, 300
BOXES = (
    Box(20, 40, 230, 90, ("Your notebook or script", "imports no torch for ranks,", "touches no GPU")),
    Box(20, 190, 230, 80, ("Watcher (a thread of it)", "reads files of the ranks,", "reports hangs and errors")),
    Box(330, 40, 190, 90, ("Rank server", "has imported torch, has", "not used it; forks ranks")),
    Box(610, 30, 230, 60, ("Rank 0", "your code on GPU 0"), is_rank=True),
    Box(610, 110, 230, 60, ("Rank 1", "your code on GPU 1"), is_rank=True),
    Box(610, 210, 230, 60, ("Flight rings, journals", "memory-mapped files, one a rank")),
)
ARROWS = (
    Arrow((250, 85), (330, 85), "starts"),
    Arrow((520, 72), (610, 60), "forks"),
    Arrow((520, 98), (610, 135)),
    Arrow((725, 170), (725, 210), "write"),
    Arrow((610, 245), (250, 235), "reads four times a second", is_dashed=True),
)
_COLORS = {
    "light": {"ink": "#24292f", "box": "#f6f8fa", "rank": "#ddf4ff", "line": "#57606a"},
    "dark": {"ink": "#e6edf3", "box": "#161b22", "rank": "#0c2d6b", "line": "#8b949e"},
}


def draw() -> None:
    """Draw "processes"."""
    for_each_scheme(render, "processes")


def render(scheme: Scheme) -> str:
    """Return the diagram as SVG."""
    colors = _COLORS[scheme]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13">'
    )
    marker = (
        '<defs><marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{colors["line"]}"/></marker></defs>'
    )
    parts = [head, "<title>Processes of a session on two GPUs</title>", marker]
    parts += [line for box in BOXES for line in _box(box, colors)]
    parts += [line for arrow in ARROWS for line in _arrow(arrow, colors)]
    return "\n".join([*parts, "</svg>"])


def _box(box: Box, colors: dict[str, str]) -> Iterator[str]:
    fill = colors["rank" if box.is_rank else "box"]
    yield (
        f'<rect x="{box.left}" y="{box.top}" width="{box.width}" height="{box.height}" rx="6" fill="{fill}" '
        f'stroke="{colors["line"]}"/>'
    )
    top = box.top + box.height / 2 - 9 * (len(box.lines) - 1) + 4
    for number, text in enumerate(box.lines):
        weight = ' font-weight="600"' if number == 0 else ""
        yield (
            f'<text x="{box.left + box.width / 2:g}" y="{top + 18 * number:g}" text-anchor="middle" '
            f'fill="{colors["ink"]}"{weight}>{escape(text)}</text>'
        )


def _arrow(arrow: Arrow, colors: dict[str, str]) -> Iterator[str]:
    (x1, y1), (x2, y2) = arrow.start, arrow.end
    dashes = ' stroke-dasharray="5 4"' if arrow.is_dashed else ""
    yield (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colors["line"]}" stroke-width="1.5"{dashes} '
        'marker-end="url(#end)"/>'
    )
    if arrow.text:
        is_upright = x1 == x2
        x, y = (x1 + x2) / 2 + (8 if is_upright else 0), (y1 + y2) / 2 + (4 if is_upright else -8)
        anchor = "start" if is_upright else "middle"
        yield f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colors["ink"]}">{escape(arrow.text)}</text>'
