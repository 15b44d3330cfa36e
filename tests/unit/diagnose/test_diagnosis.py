# SPDX-License-Identifier: Apache-2.0
"""A diagnosis sorts its lines, fits a screen, and says the same as text, HTML and JSON."""

from __future__ import annotations

import json

from ddpilot.diagnose.diagnosis import Diagnosis, Line, merge_nodes
from ddpilot.findings.catalog import make_finding

OK = Line("host_name", "network", "vm is 10.0.0.1")
WARNING = Line("cores", "limits", make_finding("DDP804", summary="9 threads <here>"))
ERROR = Line("master_port", "network", make_finding("DDP103", summary="the port is taken", fix="Stop it"))
FOUND = Diagnosis("doctor: vm, 2 ranks", (OK, WARNING, ERROR), ("export NCCL_DEBUG=INFO  # values failed",))


def test_text_has_errors_first_then_warnings_then_what_is_ok() -> None:
    """With counts in the first line, fixes and lines to paste."""
    text = str(FOUND)
    assert text.startswith("doctor: vm, 2 ranks: 1 error, 1 warning, 1 ok\n\n")
    places = [text.index(part) for part in ("the port is taken", "9 threads", "to paste:", "ok  host_name")]
    assert places == sorted(places)
    assert "fix: Stop it\n  see: ddpilot explain DDP103" in text
    assert FOUND.exit_status == 1
    assert Diagnosis("x", (OK, WARNING)).exit_status == 0


def test_text_fits_a_screen_unless_it_is_verbose() -> None:
    """What is ok shrinks to names, then findings are cut with a note; -v has everything."""
    errors = [
        Line("port", "network", make_finding("DDP103", summary=f"port {n} is taken", fix="Stop")) for n in range(9)
    ]
    many = Diagnosis("many", (*errors, WARNING, *(OK,) * 20))
    short = many.render(height=20)
    assert len(short.splitlines()) <= 20
    assert "also: 3 more places" in short
    assert "... and 1 more: `ddpilot doctor -v`" in short
    assert "ok  network: host_name" in short
    assert many.render(verbose=True, height=20).count(" is taken") == 9


def test_long_lines_are_cut_on_the_screen_only() -> None:
    """A row of what is ok takes one line."""
    long = Diagnosis("long", (Line("interfaces", "network", "x" * 500),))
    assert all(len(line) <= 200 for line in long.render().splitlines())
    assert "x" * 500 in long.render(verbose=True)


def test_json_has_every_line_with_its_finding() -> None:
    """Counts, statuses and fixes."""
    found = json.loads(json.dumps(FOUND.to_dict()))
    assert (found["errors"], found["warnings"], found["ok"]) == (1, 1, 1)
    assert [line["status"] for line in found["lines"]] == ["ok", "warning", "error"]
    assert found["lines"][2]["finding"]["fix"] == "Stop it"
    assert found["settings"] == list(FOUND.settings)
    assert found["findings"] == [found["lines"][2]["finding"], found["lines"][1]["finding"]]


def test_html_escapes_and_folds_what_is_ok() -> None:
    """The notebook's view of the same lines."""
    html = FOUND._repr_html_()
    assert "9 threads &lt;here&gt;" in html
    assert "<details><summary>1 ok</summary>" in html
    assert "1 error" in html
    assert repr(FOUND) == "Diagnosis('doctor: vm, 2 ranks', 1 error, 1 warning, 1 ok)"


def test_json_can_be_read_back() -> None:
    """As the other ranks of a job do."""
    assert Diagnosis.from_dict(json.loads(json.dumps(FOUND.to_dict()))) == FOUND


def test_lines_of_several_nodes_are_merged() -> None:
    """Equal ones once; a finding of one node names it; rows of one check take one line on a screen."""
    other = Line("host_name", "network", "b is 10.0.0.2")
    merged = tuple(merge_nodes({0: [OK, WARNING], 1: [other, WARNING, ERROR]}))
    assert [(line.check, line.nodes) for line in merged] == [
        ("host_name", (0,)),
        ("host_name", (1,)),
        ("cores", ()),
        ("master_port", (1,)),
    ]
    found = Diagnosis("two", merged)
    assert found.findings[0].summary == "node 1: the port is taken"
    assert found.findings[1].summary == "9 threads <here>"
    assert "ok  host_name         node 0: vm is 10.0.0.1 (and 1 more)" in str(found)
    assert "node 1: b is 10.0.0.2" in found.render(verbose=True)
