# SPDX-License-Identifier: Apache-2.0
"""What a profile states about its figures; which recordings it can be made of."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from ddpilot.cli.profile_command import _read_part
from ddpilot.profiler.result import make_profile
from ddpilot.profiler.spans_file import TimesWriter, read_times
from tests.unit.profiler.made_times import MS, NUM_UPDATES, make_times
from tests.unit.profiler.recordings import write_recording

_PHASES = {"forward": 4.0, "backward": 6.0, "communication": 2.0}


def test_updates_that_only_some_ranks_made_are_stated() -> None:
    """As under `Join`, or if a rank ends its epoch early."""
    times = [make_times(rank, _PHASES, facts={"clock": "one"}) for rank in (0, 1)]
    assert make_profile(times).notes == ()
    shorter = replace(times[0], updates=times[0].updates[: NUM_UPDATES - 5])
    profile = make_profile([shorter, times[1]])
    said = "the last updates are left out (5 of rank 1), since rank 0 made fewer"
    assert profile.notes == (said,)
    assert f"note: {said}\n" in profile.summary
    assert said in profile._repr_html_()
    assert profile.to_dict()["notes"] == [said]


def test_updates_that_do_not_correspond_are_stated() -> None:
    """Rank 1 has made updates alone before: those of one number are at different times, and are not compared."""
    times = [make_times(rank, _PHASES, facts={"clock": "one"}) for rank in (0, 1)]
    spans, updates = times[1].spans.copy(), times[1].updates.copy()
    for name in ("begin_ns", "end_ns"):
        spans[name] -= 12 * MS
    updates["end_ns"] -= 12 * MS
    profile = make_profile([times[0], replace(times[1], spans=spans, updates=updates)])
    assert profile.notes == ("updates of the ranks do not correspond, so that waiting is shown as communication",)
    assert not profile.phases.share("waiting").any()
    assert numpy.isnan(profile.phases.arrivals_s).all()
    assert make_profile(times).notes == ()


def test_ranks_that_exchange_nothing_are_stated() -> None:
    """A script without a process group, started on several ranks; one rank alone has nothing to exchange."""
    times = [make_times(rank, {"forward": 4.0, "backward": 6.0}) for rank in (0, 1)]
    said = "the ranks exchanged nothing in these updates: each trains a model of its own"
    assert make_profile(times).notes == (said,)
    assert make_profile(times[:1]).notes == ()


def test_the_mean_is_stated_if_it_differs_from_the_median() -> None:
    """The table has means, which some long updates raise."""
    even = make_profile([make_times(0, _PHASES)])
    assert "12 ms each (12 to 12)" in even.headline
    uneven = make_profile([make_times(0, {**_PHASES, "data": [0.0, 0.0, 0.0, 40.0]})])
    assert "12 ms each (12 to 52; 22 on average)" in uneven.headline


def test_page_shows_a_profile_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/how_to/profile.md has the report of a recording in which rank 1 loads data more slowly, and rows of it."""
    monkeypatch.setenv("COLUMNS", "120")
    write_recording(tmp_path, 2, 60)
    summary = make_profile([read_times(tmp_path, rank) for rank in (0, 1)]).summary.rstrip()
    page = (Path(__file__).parents[3] / "docs" / "how_to" / "profile.md").read_text()
    assert f"$ ddpilot profile train.py -n 2\n...\n\n{summary}\n```\n" in page
    (rows,) = re.findall(r"```text\n(B backward.*?)```", page, re.DOTALL)
    assert set(rows.splitlines()) - {"..."} <= set(summary.splitlines())


def test_a_part_is_read_only_if_every_rank_has_written_everything(tmp_path: Path) -> None:
    """A rank that was killed has not; neither has one that never started."""
    write_recording(tmp_path, 2, 12)
    assert _read_part(tmp_path) is None
    for rank in (0, 1):
        TimesWriter(tmp_path, rank).write_fact("world_size", 2)
        TimesWriter(tmp_path, rank).write_fact("num_devices", 0)
        assert (_read_part(tmp_path) is not None) == (rank == 1)
    TimesWriter(tmp_path, 0).write_fact("world_size", 3)
    assert _read_part(tmp_path) is None
