# SPDX-License-Identifier: Apache-2.0
"""The diagnosis of a program shows the same as text, HTML and JSON."""

from __future__ import annotations

import json

import pytest

from ddpilot.diagnose.ladder.result import RUNGS, Item, ProgramDiagnosis, Rung, complete
from ddpilot.findings.catalog import make_finding
from ddpilot.user_files import CodeLine

PLACE = CodeLine("train.py", 7, "", "loss.backward()")
FAILED = complete(
    (
        Rung(letter="a", status="ok", evidence="5 updates"),
        Rung(letter="b", status="wrong", evidence="a <host>", findings=(make_finding("DDP104", line=PLACE),)),
    )
)
ITEMS = (
    Item(section="data", name="divided", status="wrong", evidence="no sampler", code="DDP401", place=PLACE),
    Item(section="clean-up", name="destroyed", status="not seen"),
)
FOUND = ProgramDiagnosis(title="doctor <train>, 2 ranks", rungs=FAILED, checklist=ITEMS, notes=("a note",))


def test_rungs_after_the_one_that_is_wrong_were_not_reached() -> None:
    """All letters are there, in order."""
    assert [rung.letter for rung in FAILED] == list(RUNGS)
    assert [rung.status for rung in FAILED] == ["ok", "wrong", *["not reached"] * 5]
    assert FOUND.failed is FAILED[1]


def test_text_has_rungs_then_the_finding_then_the_checklist() -> None:
    """A line for each rung and point; sections of which there is no point are left out."""
    text = FOUND.render()
    parts = (
        "doctor <train>, 2 ranks: stopped at b, machine; 1 of 2 points of the checklist are wrong",
        "a  as one process  ok          5 updates",
        "b  machine         wrong       a <host>",
        "g  communication   not reached",
        "bad-master-addr  DDP104",
        "fix: ",
        "data\n  wrong     divided                        (train.py:7) DDP401 no sampler",
        "clean-up\n  not seen  destroyed",
    )
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert text.endswith("a note")
    assert "checkpoints" not in text


def test_html_is_escaped_and_json_is_complete() -> None:
    """Every rung, finding and point."""
    html = FOUND._repr_html_()
    assert "doctor &lt;train&gt;" in html
    assert "a &lt;host&gt;" in html
    values = json.loads(json.dumps(FOUND.to_dict()))
    assert values["rungs"][1]["findings"][0]["code"] == "DDP104"
    assert values["checklist"][0]["place"] == {"file": "train.py", "line": 7}
    assert values["checklist"][1] == {
        "section": "clean-up",
        "item": "destroyed",
        "status": "not seen",
        "evidence": "",
        "code": "",
        "place": None,
    }


@pytest.mark.parametrize(
    ("rungs", "items", "status"),
    [(FAILED, (), 1), (FAILED[:1], ITEMS[:1], 1), (FAILED[:1], ITEMS[1:], 0), ((), (), 0)],
)
def test_exit_status_is_1_if_a_rung_or_a_point_is_wrong(
    rungs: tuple[Rung, ...], items: tuple[Item, ...], status: int
) -> None:
    """What was not seen is not wrong."""
    assert ProgramDiagnosis(title="t", rungs=rungs, checklist=items).exit_status == status


def test_remarks_are_shown_only_if_it_is_verbose() -> None:
    """A finding of severity info; long lines are cut otherwise."""
    rung = Rung(letter="a", status="ok", evidence="x" * 300, findings=(make_finding("DDP414"),))
    found = ProgramDiagnosis(title="t", rungs=(rung,))
    assert "DDP414" not in found.render()
    assert "DDP414" in found.render(verbose=True)
    assert "x..." in found.render()
    assert "x" * 300 in found.render(verbose=True)
