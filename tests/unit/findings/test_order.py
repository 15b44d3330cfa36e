# SPDX-License-Identifier: Apache-2.0
"""Findings are sorted, grouped and placed under their cause."""

from __future__ import annotations

from dataclasses import replace

from ddpilot.findings.catalog import find_entry, make_finding
from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.findings.order import CAUSES, group_findings, sort_findings
from ddpilot.user_files import CodeLine


def make(code: str, severity: str = "error", **fields: object) -> Finding:
    """A finding with a name made of its code."""
    return Finding(code=code, name=code.lower(), severity=severity, **fields)  # type: ignore[arg-type]


def test_sort_findings_puts_errors_first_then_codes_ranks_and_lines() -> None:
    """Whatever the order in which they were found."""
    at = [CodeLine(file="train.py", line=line) for line in (3, 20)]
    expected = [
        make("D2", ranks=(0,), place=at[0]),
        make("D2", ranks=(0,), place=at[1]),
        make("D2", ranks=(1,), place=at[0]),
        make("D3"),
        make("D1", "warning"),
        make("D0", "info"),
    ]
    assert list(sort_findings(reversed(expected))) == expected
    assert list(Findings(reversed(expected))) == expected


def test_group_findings_joins_what_has_the_same_code_and_fix() -> None:
    """The same code with a different fix is a group of its own."""
    first, second, other = make("D1", fix="a", ranks=(0,)), make("D1", fix="a", ranks=(1,)), make("D1", fix="b")
    assert [group.members for group in group_findings([second, other, first])] == [(first, second), (other,)]


def test_a_consequence_stands_under_its_cause() -> None:
    """Both by the table of codes and where a check names the cause; JSON names it too."""
    port, absent = make_finding("DDP103"), make_finding("DDP105")
    end = replace(make_finding("DDP208"), explained_by="DDP103")
    (group,) = group_findings([absent, end, port])
    assert group.members == (port,)
    assert [below.members[0].code for below in group.consequences] == ["DDP105", "DDP208"]
    assert [each["explained_by"] for each in Findings([absent, end, port]).to_list()] == ["", "DDP103", "DDP103"]
    assert [each.explained_by for each in sort_findings([absent])] == [""]


def test_a_cause_has_the_place_of_its_most_severe_consequence() -> None:
    """A warning that explains an error is shown before other warnings and errors with a later code."""
    warning, error, other = make("D9", "warning"), make("D2", explained_by="D9"), make("D3")
    assert [each.code for each in sort_findings([other, warning, error])] == ["D9", "D2", "D3"]


def test_ranked_findings_keep_their_order() -> None:
    """Groups are in the order of their first finding, as those of a profile, whatever their severity."""
    ranked = [make("D3", "info"), make("D1", ranks=(1,)), make("D2", explained_by="D3"), make("D1", ranks=(0,))]
    expected = [ranked[0], ranked[2], ranked[3], ranked[1]]
    assert list(Findings(ranked, is_ranked=True)) == expected
    assert str(Findings(ranked, is_ranked=True)).startswith("d3  D3")
    assert [each.code for each in Findings(ranked)] == ["D1", "D1", "D3", "D2"]


def test_causes_in_a_circle_and_chains_lose_no_finding() -> None:
    """A chain is one group of its first cause."""
    circle = [make("D1", explained_by="D2"), make("D2", explained_by="D1")]
    assert [each.code for each in sort_findings(circle)] == ["D1", "D2"]
    chain = [make("D1", explained_by="D2"), make("D2", explained_by="D3"), make("D3")]
    assert [each.code for each in sort_findings(chain)] == ["D3", "D1", "D2"]
    assert len(group_findings(chain)) == 1


def test_sorting_twice_changes_nothing() -> None:
    """Findings that were read back are in the same order."""
    findings = sort_findings([make_finding("DDP105"), make("D9", "warning"), make_finding("DDP103")])
    assert sort_findings(findings) == findings


def test_causes_are_pages() -> None:
    """Each code of the table exists."""
    for code, causes in CAUSES.items():
        assert code not in causes
        for each in (code, *causes):
            find_entry(each)
