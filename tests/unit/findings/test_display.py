# SPDX-License-Identifier: Apache-2.0
"""Render findings as text and HTML."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ddpilot.findings.display import Findings, render_html, render_text
from ddpilot.findings.finding import Finding
from tests.unit.findings.samples import DESYNC, HOSTILE, SMALL_BATCH


def test_findings_are_a_sorted_sequence() -> None:
    """Length, index, slice, iteration, membership and equality are those of a tuple."""
    findings = Findings(iter([SMALL_BATCH, DESYNC]))
    assert len(findings) == 2
    assert findings[0] is DESYNC
    assert findings[-1] is SMALL_BATCH
    assert list(findings) == [DESYNC, SMALL_BATCH]
    assert findings[1:] == Findings([SMALL_BATCH])
    assert HOSTILE not in findings
    assert not Findings()
    with pytest.raises(IndexError):
        findings[2]


def test_findings_show_themselves_everywhere() -> None:
    """HTML in a notebook, the text report in IPython and print, and codes inside other values."""
    from IPython.core.formatters import PlainTextFormatter

    findings = Findings([DESYNC, SMALL_BATCH])
    assert findings._repr_html_() == render_html(findings)
    assert str(findings) == PlainTextFormatter()(findings) == render_text(findings)
    assert repr([findings]) == "[Findings(DDP201, DDP305)]"


WIDE = """\
desync  DDP201  collective #214 of the default group differs between ranks
  ranks 0,2,3  all_reduce, DDP gradient bucket 0   train.py:88  loss.backward()
  rank 1       barrier                             train.py:91  dist.barrier()
  in common until #213: broadcast of DDP buffers, train.py:85
  why: the barrier at train.py:91 is inside `if rank == 1:` (train.py:90); the others went on to backward
  fix: move it out of the branch, so that every rank calls it
  see: https://pytorch.org/docs/stable/distributed.html

small_batch  DDP305  warning: BatchNorm sees 2 samples per rank
  ranks 0-3  model.py:12  self.bn = nn.BatchNorm2d(8)
  fix: convert it with SyncBatchNorm"""

NARROW = """\
small_batch  DDP305  warning: BatchNorm
    sees 2 samples per rank
  ranks 0-3  model.py:12  self.bn =
      nn.BatchNorm2d(8)
  fix: convert it with SyncBatchNorm"""


def test_render_text_is_the_report_when_there_is_room() -> None:
    """Head, ranks and place, evidence in its own columns, why, fix, where to read; blocks apart by an empty line."""
    assert render_text([DESYNC, SMALL_BATCH]) == WIDE


def test_render_text_wraps_when_told_a_width() -> None:
    """Continuation lines are indented by four more columns."""
    assert render_text([SMALL_BATCH], width=40) == NARROW


@pytest.mark.parametrize("width", [1, 40, 60, 79, 200])
def test_render_text_keeps_to_the_width_and_loses_no_word(width: int) -> None:
    """Only a single word longer than the width may exceed it; a width below 40 counts as 40."""
    text = render_text([DESYNC, SMALL_BATCH], width=width)
    assert text.split() == WIDE.split()
    assert all(len(line) <= max(width, 40) or len(line.split()) <= 2 for line in text.splitlines())


def test_render_text_says_so_when_there_is_nothing() -> None:
    """An empty report is a result, not an empty screen."""
    assert render_text([]) == "no findings"


def test_render_text_colors_change_nothing_but_the_color() -> None:
    """Without its escape sequences the coloured text is the plain one; the severity decides the colour."""
    colored = render_text([DESYNC, SMALL_BATCH], color=True)
    assert colored.startswith("\x1b[1;31mdesync\x1b[0m  DDP201")
    assert "\x1b[1;33msmall_batch\x1b[0m" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == WIDE


def test_render_text_lets_no_terminal_command_through() -> None:
    """A clear-screen sequence in a finding is escaped; a second line of evidence is indented."""
    text = render_text([HOSTILE])
    assert "\x1b" not in text
    assert "a & b\\x1b[2J" in text
    assert "\n  two\n      lines\n" in text


def test_render_text_keeps_4096_ranks_on_one_line() -> None:
    """Every second rank of 4,096 still fits the width of a terminal."""
    finding = Finding(code="X1", name="many", severity="info", ranks=tuple(range(0, 4096, 2)))
    lines = render_text([finding]).splitlines()
    assert len(lines) == 2
    assert len(lines[1]) < 80
    assert lines[1].endswith("4094 (2048 in all)")


def test_render_text_does_not_repeat_the_ranks_of_the_summary_in_a_row_of_their_own() -> None:
    """There is no place to show with them."""
    finding = Finding(code="DDP209", name="rank-died", severity="error", summary="rank 1 died of SIGSEGV", ranks=(1,))
    assert render_text([finding]) == "rank-died  DDP209  rank 1 died of SIGSEGV"
    assert "rank 11 died" in render_text(
        [Finding(code="D", name="n", severity="error", summary="rank 11 died", ranks=(1,))]
    )
    assert "\n  rank 1" in render_text(
        [Finding(code="D", name="n", severity="error", summary="rank 11 died", ranks=(1,))]
    )


SAME = [
    Finding(
        code="DDP118",
        name="one-device",
        severity="error",
        summary=f"rank {rank} uses cuda:0",
        ranks=(rank,),
        evidence=(f"seen on rank {rank}",),
        fix="set the device",
    )
    for rank in range(9)
]
OOM = Finding(code="DDP703", name="device-out-of-memory", severity="error", summary="cuda:0 is full", fix="use less")

GROUPED = """\
one-device  DDP118  rank 0 uses cuda:0
  seen on rank 0
  also: rank 1 uses cuda:0
    seen on rank 1
  fix: set the device
  so: device-out-of-memory  DDP703  cuda:0 is full
    fix: use less"""

BRIEF = """\
one-device  DDP118  rank 0 uses cuda:0
  seen on rank 0
  also: rank 1 uses cuda:0
  also: rank 2 uses cuda:0
  also: rank 3 uses cuda:0
  also: rank 4 uses cuda:0
  also: rank 5 uses cuda:0
  also: 3 more places
  fix: set the device
  so: device-out-of-memory  DDP703  cuda:0 is full

... and 1 more: `ddpilot watch -v`"""


def test_render_text_shows_equal_findings_together_and_consequences_below() -> None:
    """One block with one fix; what the ranks do not have in common is shown for each."""
    assert render_text([OOM, SAME[1], SAME[0], SAME[0]]) == GROUPED


def test_render_text_takes_at_most_the_height() -> None:
    """First it is shortened, then findings are left out from the end, then lines of the first one."""
    findings = [SMALL_BATCH, OOM, *SAME]
    full = render_text(findings)
    assert len(full.splitlines()) == 25
    assert render_text(findings, height=25) == full
    more = "`ddpilot watch -v`"
    assert render_text(findings, height=13, more=more) == BRIEF
    for height in range(3, 30):
        text = render_text(findings, width=60, height=height, more=more)
        assert len(text.splitlines()) <= height
        assert text.startswith("one-device  DDP118  rank 0")
        assert text.endswith(f": {more}") == (height < 26)


def test_a_long_line_counts_as_the_rows_that_it_takes() -> None:
    """Text that is not wrapped, on a screen of 120 columns."""
    long = [Finding(code=f"D{n}", name="n", severity="error", summary="x" * 1000) for n in range(5)]
    assert len(render_text(long, height=30).splitlines()) == 5
    assert render_text(long, height=30).endswith("... and 3 more")


def test_findings_say_where_the_rest_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice does too."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")
    findings = Findings([replace(SMALL_BATCH, code=f"D{n}") for n in range(20)], more="`ddpilot doctor -v`")
    assert str(findings).endswith("... and 11 more: `ddpilot doctor -v`")
    assert str(findings[:19]).endswith("... and 10 more: `ddpilot doctor -v`")


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
    """The HTML contains everything that the text report does."""
    shown = Reader(render_html([DESYNC, SMALL_BATCH])).shown
    for part in (DESYNC.code, DESYNC.summary, *DESYNC.evidence, DESYNC.why, DESYNC.fix, DESYNC.source):
        assert part in shown
    for part in ("warning", "ranks 0-3", "model.py:12", "self.bn = nn.BatchNorm2d(8)"):
        assert part in shown


def test_render_html_has_the_groups_of_the_text_and_folds_what_takes_more_than_a_screen() -> None:
    """Everything is in it, in the same order."""
    findings = [*(replace(SMALL_BATCH, code=f"D{n}") for n in range(20)), OOM, *SAME]
    html = render_html(findings)
    shown = Reader(html).shown
    order = ["DDP118", "rank 8 uses cuda:0", "device-out-of-memory", "cuda:0 is full", "D0", "D19"]
    assert sorted(order, key=shown.index) == order
    assert shown.count("set the device") == 1
    assert "and 3 more" in shown
    assert html.count("<details>") == 2


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
    """A source that is a URL becomes a link without a referrer."""
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
    from ddpilot.findings.display import _HTML_COLORS

    for color in _HTML_COLORS.values():
        digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        assert 1.05 / (luminance + 0.05) >= 3, color
        assert (luminance + 0.05) / 0.05 >= 3, color
