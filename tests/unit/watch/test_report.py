# SPDX-License-Identifier: Apache-2.0
"""Reports as text and as JSON, and what of them is told again."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ddpilot.errors import DdpilotError, LaunchError, WatchError
from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.user_files import CodeLine
from ddpilot.watch.analysis import Analysis
from ddpilot.watch.explain.text import merge_rows
from ddpilot.watch.options import WatchOptions
from ddpilot.watch.report import Report, ReportHistory, newest, read_report
from ddpilot.watch.snapshot.files import parse_stack

DESYNC = Finding(
    code="DDP201",
    name="desync",
    severity="error",
    summary="collective #5 differs",
    ranks=(0, 1),
    place=CodeLine(file="train.py", line=88),
)
WAITING = Analysis(findings=Findings(), status=("rank 0 waits for 2.1 s",), is_stalled=True)


def test_report_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    """And as text for people."""
    report = Report(job="1121-a", name="train", world_size=4, findings=Findings([DESYNC]), unseen=(2, 3), notes=("n",))
    report.save(tmp_path)
    assert read_report(tmp_path) == report
    text = (tmp_path / "report.txt").read_text()
    assert text.startswith("train on 4 ranks, job 1121-a\n  n\n  not visible from here: ranks 2,3\n\ndesync  DDP201  ")


def test_report_takes_a_screen_unless_it_is_verbose(tmp_path: Path) -> None:
    """The command that shows the rest is named; the saved text, JSON and HTML have all findings in one order."""
    findings = Findings([replace(DESYNC, code=f"DDP{n}", name=f"name{n}") for n in range(240, 200, -1)])
    report = Report(job="1121-a", name="train", world_size=2, findings=findings)
    text = report.render()
    assert str(report) == text
    assert len(text.splitlines()) <= 38
    assert text.endswith("more: `ddpilot watch 1121-a -v`")
    report.save(tmp_path)
    assert (tmp_path / "report.txt").read_text() == report.render(verbose=True) + "\n"
    codes = [f"DDP{n}" for n in range(201, 241)]
    assert re.findall(r"DDP\d+", report.render(verbose=True)) == codes
    assert re.findall(r"DDP\d+", report._repr_html_()) == codes
    assert [each["code"] for each in json.loads((tmp_path / "report.json").read_text())["findings"]] == codes


def test_read_report_says_what_is_damaged(tmp_path: Path) -> None:
    """None is no error."""
    assert read_report(tmp_path) is None
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(DdpilotError, match=r"reading .*report\.json"):
        read_report(tmp_path)


def test_told_says_a_finding_once_for_its_line_or_words() -> None:
    """Ranks, evidence and even the line may differ when it is looked at again."""
    told = ReportHistory(30.0)
    assert told.new_findings([DESYNC]) == [DESYNC]
    assert told.new_findings([replace(DESYNC, ranks=(1,)), replace(DESYNC, place=None)]) == []
    other = replace(DESYNC, summary="collective #9 differs", place=CodeLine(file="train.py", line=91))
    assert told.new_findings([other]) == [other]
    assert newest([DESYNC, other, replace(DESYNC, why="since")]) == [replace(DESYNC, why="since"), other]


def test_told_says_a_wait_ever_more_seldom_while_it_lasts() -> None:
    """At once, after 30 s, 60 s later; and at once where it begins anew."""
    told = ReportHistory(30.0)
    said = [at for at in range(200) if told.new_status(WAITING, float(at))]
    assert said == [0, 30, 90]
    assert told.new_status(Analysis(findings=Findings()), 201.0) == ()
    assert told.new_status(WAITING, 203.0) == WAITING.status


def test_told_takes_a_short_break_for_the_same_wait() -> None:
    """Ranks that others wait for may themselves wait for a moment, of which each look sees another."""
    told = ReportHistory(30.0)
    assert told.new_status(WAITING, 0.0) == WAITING.status
    assert told.new_status(Analysis(findings=Findings()), 0.25) == ()
    assert told.new_status(WAITING, 0.5) == ()


def test_parse_stack_reads_frames_innermost_first() -> None:
    """As the fault handler writes them."""
    text = 'Stack (most recent call first):\n  File "a b.py", line 3 in wait\n  File "Cell In[2]", line 1 in <module>\n'
    stack = parse_stack(text, 5)
    assert [(each.file, each.line, each.function) for each in stack.frames] == [
        ("a b.py", 3, "wait"),
        ("Cell In[2]", 1, "<module>"),
    ]


def test_watch_options_refuse_what_cannot_be_meant() -> None:
    """With what to give."""
    for wrong in ({"on_finding": "halt"}, {"stall_warn_s": 0}, {"watch": "yes"}):
        with pytest.raises(LaunchError, match=f"reading `{next(iter(wrong))}`: "):
            WatchOptions(**wrong)
    assert WatchOptions().action() == "stop"


def test_watch_error_shows_its_findings() -> None:
    """Below the sentence."""
    error = WatchError("running `f`", found="desync", findings=Findings([DESYNC]))
    assert str(error).startswith("running `f`: desync\n\ndesync  DDP201  collective #5 differs")


def test_rows_of_several_ranks_have_their_verb_in_the_plural() -> None:
    """What several ranks do at one place is one row."""
    rows = [(rank, "has not called it", "train.py:3") for rank in (1, 2)] + [(0, "waits for a batch", "")]
    assert merge_rows(rows) == [("ranks 1,2", "have not called it", "train.py:3"), ("rank 0", "waits for a batch", "")]


def test_read_report_refuses_a_finding_that_is_none(tmp_path: Path) -> None:
    """As of a damaged file: in one sentence."""
    (tmp_path / "report.json").write_text(
        json.dumps({**Report(job="j", name="n", world_size=1).to_dict(), "findings": [3]})
    )
    with pytest.raises(DdpilotError, match="reading"):
        read_report(tmp_path)


def find(code: str, *evidence: str) -> Finding:
    """A warning."""
    return Finding(code=code, name="a-name", severity="warning", ranks=(0, 1), evidence=evidence)


def test_a_finding_about_layers_is_shown_in_one_cell() -> None:
    """In no later one, also if it is of fewer ranks then; other layers and other codes are new each time."""
    norm, other, wait = find("DDP408", "layers: bn"), find("DDP408", "layers: bn2"), find("DDP217", "slow")
    first = ReportHistory(30.0)
    assert first.new_findings([norm, wait]) == [norm, wait]
    second = first.next_cell()
    assert second.new_findings([replace(norm, ranks=(0,)), replace(other, summary="two layers"), wait]) == [
        replace(other, summary="two layers"),
        wait,
    ]
    assert second.next_cell().new_findings([norm, other, wait]) == [wait]
