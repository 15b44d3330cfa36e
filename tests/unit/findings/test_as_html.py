# SPDX-License-Identifier: Apache-2.0
"""The HTML fragment: well-formed, escaped, and of no fixed colours that a theme could clash with."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from ddpilot.findings.as_html import render_html
from tests.unit.findings.samples import DESYNC, HOSTILE, SMALL_BATCH


class Reader(HTMLParser):
    """Collects tags, attributes and text, and fails on a tag that is closed out of turn."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: dict[str, list[str]] = {}
        self.shown = ""
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.shown += data


def test_render_html_shows_every_part_of_a_finding() -> None:
    """Nothing that the text report says is missing."""
    shown = Reader(render_html([DESYNC, SMALL_BATCH])).shown
    for part in (DESYNC.code, DESYNC.summary, *DESYNC.evidence, DESYNC.why, DESYNC.fix, DESYNC.source):
        assert part in shown
    for part in ("warning", "ranks 0-3", "model.py:12", "self.bn = nn.BatchNorm2d(8)"):
        assert part in shown


def test_render_html_escapes_everything() -> None:
    """Markup in a finding is shown as text; no tag and no attribute comes from it, no link runs a script."""
    html = render_html([HOSTILE])
    read = Reader(html)
    assert read.tags <= {"div", "b", "i", "code", "pre"}
    assert set(read.attributes) == {"class", "style"}
    assert "<script>alert(1)</script>" in read.shown
    assert "javascript:alert(3)" in read.shown
    assert "\x1b" not in html


def test_render_html_links_web_addresses_only() -> None:
    """A source that is a URL becomes a link that tells its target nothing."""
    read = Reader(render_html([DESYNC]))
    assert read.attributes["href"] == [DESYNC.source]
    assert read.attributes["rel"] == ["noopener noreferrer"]


@pytest.mark.parametrize("findings", [[], [DESYNC], [DESYNC, SMALL_BATCH, HOSTILE]])
def test_render_html_is_one_fragment_that_suits_any_theme(findings: list[object]) -> None:
    """One outer div, nothing to load or run, text in the notebook's own colour on its own background."""
    html = render_html(findings)  # type: ignore[arg-type]
    read = Reader(html)
    assert html.startswith('<div class="ddpilot-findings">')
    assert html.endswith("</div>")
    assert not read.tags & {"script", "style", "link", "img", "iframe", "html", "body"}
    assert "background:#" not in html
    assert "background-color" not in html


def test_render_html_says_so_when_there_is_nothing() -> None:
    """An empty report is a result."""
    assert Reader(render_html([])).shown == "no findings"


def test_render_html_colors_read_on_white_and_on_black() -> None:
    """Each severity's colour has a contrast of at least 3 to both, the minimum for bold text and lines."""
    from ddpilot.findings.as_html import _COLORS

    for color in _COLORS.values():
        digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        assert 1.05 / (luminance + 0.05) >= 3, color
        assert (luminance + 0.05) / 0.05 >= 3, color
