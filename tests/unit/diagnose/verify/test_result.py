# SPDX-License-Identifier: Apache-2.0
"""A verification shows the same as text, HTML and JSON."""

from __future__ import annotations

import json

from ddpilot.diagnose.verify.result import UpdateRow, Verification
from ddpilot.findings.catalog import make_finding

ROW = UpdateRow(
    update=1, site="train.py:3", num_samples=(16, 16), losses=(1.5, None), gradient=0.5, parameter=1e-9, same_states=()
)
FOUND = Verification(
    title="verify <train>, 1 and 2 ranks",
    verdict="different",
    summary="every gradient is twice as large",
    findings=(make_finding("DDP823"),),
    rows=(ROW,),
    floors={"same run twice": 0.0},
    notes=("dropout was off",),
)


def test_text_has_verdict_finding_updates_and_noise() -> None:
    """In this order; an equal result has the updates only if it is verbose."""
    text = str(FOUND)
    parts = ("verify <train>, 1 and 2 ranks: different", "wrong-scale  DDP823", "update    samples")
    places = [text.index(each) for each in (*parts, "1         16 | 16      1.5 | -", "same run twice: 0.0e+00")]
    assert places == sorted(places)
    assert text.endswith("dropout was off")
    equal = Verification(title="t", verdict="equal", summary="s", rows=(ROW,))
    assert "samples" not in str(equal)
    assert "samples" in equal.render(verbose=True)
    assert repr(FOUND) == "Verification('verify <train>, 1 and 2 ranks', 'different')"


def test_exit_status_is_0_only_for_equal_numbers_without_an_error() -> None:
    """An error of guard counts although the numbers agree; a warning does not."""
    assert FOUND.exit_status == 1
    assert Verification(title="t", verdict="unknown", summary="s").exit_status == 1
    assert Verification(title="t", verdict="equal", summary="s").exit_status == 0
    for code, status in (("DDP401", 1), ("DDP414", 0)):
        found = Verification(title="t", verdict="equal", summary="s", findings=(make_finding(code),))
        assert found.exit_status == status


def test_html_is_escaped_and_json_is_complete() -> None:
    """Names and text may hold anything."""
    html = FOUND._repr_html_()
    assert "verify &lt;train&gt;" in html
    assert "<train>" not in html
    values = json.loads(json.dumps(FOUND.to_dict()))
    assert values["verdict"] == "different"
    assert values["findings"][0]["code"] == "DDP823"
    assert values["updates"][0]["losses"] == [1.5, None]
    assert values["notes"] == ["dropout was off"]


def test_error_of_the_program_is_shown_whole() -> None:
    """With its traceback."""
    failed = Verification(title="t", verdict="unknown", summary="it failed", details="it failed\n\nTraceback\n  x")
    assert "Traceback\n  x" in str(failed)
    assert "Traceback" in failed._repr_html_()
    assert failed.to_dict()["details"].endswith("x")
