# SPDX-License-Identifier: Apache-2.0
"""Pages of findings: their format, one for each code, and the search for a message."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from ddpilot.errors import DdpilotError
from ddpilot.findings.catalog import (
    SECTIONS,
    Entry,
    all_entries,
    find_asked,
    find_entry,
    find_known,
    fix_in_rank,
    make_finding,
    parse_page,
)
from tests.each import for_each

SOURCE = Path(__file__).parents[3] / "src" / "ddpilot"
PAGE = """# DDP999 a-name: What it is
severity: warning

## What you see
- `Timed out after ... waiting for clients.`
- `another: message`

## What it means
Words.

## Why it happens
Words.

## Wrong
```python
wrong()
```

## Right
```python
right()
```

## How to fix it
- Do this,
  and that.
- Or else that.

## Sources
None.
"""


def test_parse_page_reads_title_severity_and_symptoms() -> None:
    """The page contains everything that reports and the search need."""
    entry = parse_page(PAGE)
    assert (entry.code, entry.name, entry.severity, entry.title) == ("DDP999", "a-name", "warning", "What it is")
    assert entry.symptoms == ("Timed out after ... waiting for clients.", "another: message")
    assert entry.section("Why it happens") == "Words."
    assert entry.first_fix == "Do this, and that"
    assert entry.found_by == ("message",)
    assert "severity: warning" in entry.text


def test_parse_page_reads_what_reports_the_finding() -> None:
    """The line is not a part of the text, which the footer continues."""
    entry = parse_page(PAGE.replace("warning\n", "warning\nfound by: watch, program doctor\n"))
    assert entry.found_by == ("watch", "program doctor")
    assert "found by" not in entry.text


def test_optional_sections_stand_before_the_sources() -> None:
    """Other causes come first, then the fix in a launched rank."""
    both = "## Other causes\nA few.\n\n## In a launched rank\nThis.\n\n## Sources"
    entry = parse_page(PAGE.replace("## Sources", both))
    assert (entry.section("Other causes"), entry.section("In a launched rank")) == ("A few.", "This.")


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "# DDP999: no name", PAGE.replace("warning", "grave"), PAGE.replace("## Sou", "# ")),
        PAGE.replace("## Right", "### Right"),
        PAGE.replace("warning\n", "warning\nfound by: nobody\n"),
        PAGE.replace("## How", "## Other causes\nA few.\n\n## How"),
    ],
)
def test_parse_page_refuses_another_shape(wrong: str) -> None:
    """A page without a section would leave a gap in a report."""
    with pytest.raises(DdpilotError, match="Begin with"):
        parse_page(wrong)


def test_entry_matches_a_message_whatever_differs_and_however_it_is_wrapped() -> None:
    """What `...` stands for may be anything, within the message; words alone are no match."""
    entry = parse_page(PAGE)
    assert entry.matches("DistStoreError: Timed out after 9 seconds\n   waiting for clients. 1/2 clients joined.")
    assert not entry.matches("Timed out after lunch")


class Log(str):
    """Counts how often it is split into words."""

    __slots__ = ()
    num_splits = 0

    def split(self, *arguments: Any) -> list[str]:
        """As of `str`."""
        Log.num_splits += 1
        return super().split(*arguments)


def test_a_log_is_split_into_words_a_few_times_and_not_for_each_page() -> None:
    """It may have many megabytes."""
    assert find_asked(Log("step 3\nRUNTIMEERROR: CUDA OUT OF MEMORY. TRIED TO ALLOCATE 2 GiB"))[0].code == "DDP703"
    assert Log.num_splits <= 4


@for_each(all_entries(), lambda entry: entry.code)
def test_every_page_is_found_by_its_code_its_name_and_its_symptoms(entry: Entry) -> None:
    """Codes, names and symptoms are unique, and no section is empty."""
    assert find_entry(entry.code) is find_entry(entry.name) is find_entry(entry.code[3:]) is entry
    for symptom in entry.symptoms:
        assert find_asked(f"SomeError: {symptom.replace('...', '17')} and more")[0] is entry, symptom
    for heading in SECTIONS[1:]:
        assert entry.section(heading), heading
    assert entry.first_fix
    assert entry.main_cause


def test_fix_in_rank_is_a_section_of_its_own_or_the_first_fix() -> None:
    """The launcher has set what a script that was started without one lacks."""
    assert fix_in_rank(find_entry("DDP101")).startswith("The launcher has set RANK, LOCAL_RANK")
    assert fix_in_rank(find_entry("DDP216")) == find_entry("DDP216").first_fix
    entry = parse_page(PAGE.replace("## Sources", "## In a launched rank\nOnly\nhere.\n\n## Sources"))
    assert fix_in_rank(entry) == "Only here"


def test_find_entry_names_what_is_near() -> None:
    """An unknown code lists those of the same hundred."""
    with pytest.raises(DdpilotError, match="Similar: .*DDP308 unused-parameters"):
        find_entry("DDP399")


def test_general_pages_answer_a_person_and_explain_no_rank() -> None:
    """A message such as torchrun's summary does not name the cause, so reports ignore its page."""
    summary = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ... exitcode  : -9 (pid: 7)"
    assert find_known(summary) == ()
    assert [entry.name for entry in find_asked(summary)] == ["child-failed", "killed"]
    both = "DistBackendError: NCCL error in: x.cpp, Duplicate GPU detected : rank 1 and rank 0 both on CUDA device"
    assert [entry.name for entry in find_asked(both)] == ["one-device", "nccl-error"]
    assert parse_page(PAGE.replace("warning\n", "warning\ngeneral: yes\n")).is_general


def test_make_finding_takes_from_the_page_what_is_not_given() -> None:
    """Name and source always; severity, title, cause and fix unless the check knows better."""
    entry = find_entry("DDP216")
    plain = make_finding("DDP216", ranks=[1], why="because")
    assert (plain.name, plain.source, plain.ranks) == (entry.name, "ddpilot explain DDP216", (1,))
    assert (plain.severity, plain.summary, plain.fix) == (entry.severity, entry.title, entry.first_fix)
    assert make_finding("DDP216").why == entry.main_cause
    own = make_finding("DDP216", severity="error", summary="what happened", fix="do that", why="because")
    assert (own.name, own.severity, own.summary, own.fix) == (entry.name, "error", "what happened", "do that")


def test_every_code_in_the_source_has_a_page() -> None:
    """A report never names a page that does not exist."""
    used = {code for path in SOURCE.rglob("*.py") for code in re.findall(r'"(DDP\d{3})"', path.read_text())}
    assert used - {entry.code for entry in all_entries()} == set()


def test_every_page_stands_in_the_list_of_findings() -> None:
    """docs/errors/index.md is up to date: `make reference` writes it."""
    listed = (SOURCE.parents[1] / "docs" / "errors" / "index.md").read_text()
    for entry in all_entries():
        assert f"[{entry.code}](../../src/ddpilot/findings/pages/{entry.code}.md) | {entry.name} |" in listed
        assert all(f"`{symptom}`" in listed or "|" in symptom for symptom in entry.symptoms)


def test_findings_name_the_command_and_the_address_of_their_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address follows once the project has one."""
    assert make_finding("DDP201").source == "ddpilot explain DDP201"
    monkeypatch.setattr("ddpilot._project.PROJECT_URL", "https://example.org/ddpilot")
    page = "https://example.org/ddpilot/blob/main/src/ddpilot/findings/pages/DDP201.md"
    assert make_finding("DDP201").source == f"ddpilot explain DDP201 or {page}"


@pytest.mark.parametrize("path", [path for path in SOURCE.rglob("*.py") if " Finding(" in path.read_text()])
def test_every_finding_of_the_source_says_how_to_open_its_page(path: Path) -> None:
    """Each call of `Finding` passes a source; those of `make_finding` have the command."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Finding"]
    assert all("source" in [keyword.arg for keyword in call.keywords] for call in made)
