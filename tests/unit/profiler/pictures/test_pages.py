# SPDX-License-Identifier: Apache-2.0
"""Reports as HTML: one small file without network or scripts, whose numbers are those of the profile."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy
import pytest

from ddpilot.profiler.phases import SHARES
from ddpilot.profiler.pictures.charts import (
    COLORS,
    LEGEND,
    WHITE_TEXT,
    format_ms,
    format_number,
    format_tick,
    make_ticks,
)
from ddpilot.profiler.pictures.scaling_page import render_scaling
from ddpilot.profiler.result import Profile, read_profile
from tests.unit.profiler.recordings import make_scaling, write_recording

VOID = {"meta", "line", "polyline", "br"}


class Nesting(HTMLParser):
    """Checks that every element is closed, and collects attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.labels: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element."""
        found = dict(attrs)
        self.labels += [found["aria-label"] or ""] if "aria-label" in found else []
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in ("meta", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close it."""
        if tag != "line":
            assert self.open.pop() == tag


def make_profile(folder: Path, num_ranks: int, num_updates: int, *, has_device: bool = False) -> Profile:
    """The profile of a recording."""
    write_recording(folder, num_ranks, num_updates, has_device=has_device)
    return read_profile(folder)


def test_the_report_of_8_ranks_and_200_updates_is_below_2_mb(tmp_path: Path) -> None:
    """One file, well formed, that needs no address."""
    profile = make_profile(tmp_path, 8, 204)
    assert profile.phases.seconds.shape[:2] == (8, 200)
    profile.to_html(tmp_path / "profile.html", title="<train>.py")
    text = (tmp_path / "profile.html").read_text("utf-8")
    assert len(text) < 2_000_000
    assert len(text) < 400_000
    assert "&lt;train&gt;.py" in text
    page = Nesting(text)
    assert page.addresses == []
    assert not re.search(r"<script|@import|url\(|https?:", text)
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize("num_ranks", [1, 2, 64])
def test_every_picture_has_a_text(tmp_path: Path, num_ranks: int) -> None:
    """Also with one rank, which is never late, and with many."""
    profile = make_profile(tmp_path, num_ranks, 40, has_device=num_ranks == 2)
    text = profile._repr_html_()
    labels = Nesting(text).labels
    assert len(labels) == 4 + (num_ranks > 1) + (num_ranks == 2)
    assert any(label.startswith("Stacked bars of the mean update by rank") for label in labels)
    assert any(label.startswith("Timeline of update") for label in labels)
    assert any("Rank 1 is latest" in label for label in labels) == (num_ranks > 1)
    assert ("On the device, allocated by torch" in text) == (num_ranks == 2)
    assert len(text) < 1_500_000


def test_the_table_has_the_means_of_the_profile(tmp_path: Path) -> None:
    """Milliseconds, by share and rank."""
    profile = make_profile(tmp_path, 2, 40)
    text = profile._repr_html_()
    for name in ("data", "waiting", "communication"):
        means = profile.phases.share(name).mean(axis=1) * 1e3
        cells = "".join(f"<td>{value:.2f}</td>" for value in means)
        assert f'<th scope="row">{name}</th>{cells}' in text


def test_overlapped_communication_is_shown_beside_the_sum(tmp_path: Path) -> None:
    """In text, table, bars and timeline: 2 ms, and the bucket after the last gradient is none of it."""
    profile = make_profile(tmp_path, 2, 40)
    assert "overlapped           2.00      2.00   (not in the sum)" in profile.summary
    text = profile._repr_html_()
    assert '<th scope="row">overlapped (not in the sum)</th><td>2.00</td><td>2.00</td>' in text
    assert text.count('title="overlapped communication: 2.00 ms"') == 2
    assert text.count('title="bucket, while backward computes: 2.00 ms"') == 2
    assert text.count('title="bucket, after the last gradient') == 2
    assert profile.to_dict()["overlapped"] == [0.002, 0.002]


def test_overlap_that_was_not_timed_is_not_shown(tmp_path: Path) -> None:
    """On one rank, and where no bucket was timed."""
    profile = make_profile(tmp_path, 2, 40)
    profile.phases.overlaps[:] = numpy.nan
    (tmp_path / "alone").mkdir()
    for each in (profile, make_profile(tmp_path / "alone", 1, 40)):
        assert "overlapped" not in each.summary
        assert "overlapped (" not in each._repr_html_()
        assert each.to_dict()["overlapped"] is None


def test_a_profile_without_lateness_says_why(tmp_path: Path) -> None:
    """The ranks called different numbers of collectives."""
    profile = make_profile(tmp_path, 2, 20)
    profile.phases.arrivals_s[:] = numpy.nan
    assert "Nothing is known: the ranks call no collectives" in profile._repr_html_()
    assert "late to the last collective" not in profile.render()


def test_text_shows_at_most_8_ranks_and_the_late_one(tmp_path: Path) -> None:
    """Of 64; in a table, bars and shades, on one screen."""
    text = make_profile(tmp_path, 64, 40).summary
    assert "8 ranks, from early to late ones:" in text
    assert re.search(r"^rank 1 +[@%#*]", text, re.MULTILINE)
    assert text.count("\n") < 60
    assert max(map(len, text.splitlines())) <= 120


def test_scaling_has_its_pictures(tmp_path: Path) -> None:
    """The curve with the ideal line, and a bar of losses for each number of ranks."""
    scaling = make_scaling()
    scaling.to_html(tmp_path / "scale.html")
    text = (tmp_path / "scale.html").read_text("utf-8")
    page = Nesting(text)
    assert page.labels[0] == "Speed-up by number of ranks: 1: 1.00, 2: 1.70, 4: 2.90, 8: 4.20"
    assert "8 ranks lose 20% exposed communication" in page.labels[1]
    assert "At 8 ranks several ranks share a core or a device here" in text
    assert text.count('class="dot"') == 4
    assert "http" not in text


def test_predicted_sizes_are_a_line_of_their_own() -> None:
    """Dashed, with a dot for each, and named in the table."""
    rows = make_scaling().rows
    text = render_scaling(rows[:2], headline="train.py", findings="", predicted=rows[2:], notes=["A <note>."])
    Nesting(text)
    assert text.count("stroke-dasharray") == 2
    assert "predicted by the model" in text
    assert '<th scope="row">8 (predicted)</th>' in text
    assert "A &lt;note&gt;." in text


def test_figures_of_matplotlib_have_bars_heat_and_curve(tmp_path: Path) -> None:
    """None is left open."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    bars, heat = make_profile(tmp_path, 4, 40).plot().axes[:2]
    assert [label.get_text() for label in bars.get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert heat.images[0].get_size() == (4, 36)
    curve, losses = make_scaling().plot().axes
    assert numpy.asarray(curve.lines[0].get_ydata()).tolist() == [1, 2, 4, 8]
    assert len(losses.containers) == 5
    assert pyplot.get_fignums() == []


def luminance(color: str) -> float:
    """Relative luminance, as WCAG defines it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_on_each_color_is_readable() -> None:
    """A contrast of at least 4.5, as WCAG asks for."""
    for name, color in COLORS.items():
        other = 1.0 if name in WHITE_TEXT else 0.0
        high, low = sorted((luminance(color), other), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, name


def test_every_share_has_a_color_of_its_own_and_a_description() -> None:
    """Those of an update, by rank and over time."""
    assert set(SHARES) <= set(COLORS)
    assert set(SHARES) <= set(LEGEND)
    assert len({COLORS[name] for name in SHARES}) == len(SHARES)


def test_numbers_are_short_and_ticks_round() -> None:
    """No exponents; ticks up to the highest value."""
    assert [format_number(value) for value in (0, 0.0123, 0.5, 12.345, 99.96, 1234.5)] == [
        "0.00", "0.01", "0.50", "12.3", "100", "1,234",
    ]  # fmt: skip
    assert format_ms(0.0205) == "20.5"
    assert make_ticks(20.0, 4) == [0, 5, 10, 15, 20]
    assert make_ticks(0.0) == [0.0]
    assert [format_tick(value, 0.05) for value in (0.0, 0.05)] == ["0.00", "0.05"]
