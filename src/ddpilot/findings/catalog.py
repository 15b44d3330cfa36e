# SPDX-License-Identifier: Apache-2.0
"""The catalog of finding codes: one Markdown page per code, read from the files in ``pages``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import combinations
from typing import cast, get_args

from ddpilot._project import page_url
from ddpilot.errors import DdpilotError
from ddpilot.findings.finding import Finding, Severity
from ddpilot.user_files import CodeLine

SECTIONS = ("What you see", "What it means", "Why it happens", "Wrong", "Right", "How to fix it", "Sources")
"""The headings of a page, in order."""
OTHER_CAUSES = "Other causes"
"""Optional heading before the last one: less frequent causes, and what is not reported."""
IN_RANK = "In a launched rank"
"""Optional heading before the last one: the fix if a launcher started the rank."""
_OPTIONAL = (OTHER_CAUSES, IN_RANK)
_HEADINGS = tuple((*SECTIONS[:-1], *some, SECTIONS[-1]) for n in range(3) for some in combinations(_OPTIONAL, n))
FOUND_BY = ("watch", "lint", "doctor", "program doctor", "verify", "profile", "scale", "loop", "message")
"""What reports a finding, as in the line ``found by:`` of its page."""

_TITLE = re.compile(r"^# (?P<code>DDP\d{3}) (?P<name>[a-z0-9-]+): (?P<title>.+)$")
_SYMPTOM = re.compile(r"^- `(?P<text>.+)`$", re.MULTILINE)
_OF_CHILD = re.compile(
    r"^(?:\w+\.)*(?:CalledProcessError|ProcessExitedException|BrokenProcessPool|ChildFailedError|SystemExit)\b"
    r"|exited unexpectedly|process \d+ terminated with exit code"
)
SHIP_ERROR = "ShipError"
"""ddpilot's own error for objects that cannot be pickled. It quotes Python's message; its own fix is more specific."""

_GENERAL = "general: yes"
_FOUND_BY = "found by: "
_GAP = "..."
_MAX_GAP_CHARS = 300
_MIN_PART_CHARS = 10
"""Shorter parts of a message, such as "rank", occur in too many symptoms."""
_LABELS = re.compile(r"^(?:\[?rank ?\d+\]?: ?)?(?:\[?[\w.]*(?:error|exception|warning)\]?: )?", re.IGNORECASE)
"""Prefix of a message: the rank and the class of the exception."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The page of one code."""

    code: str
    """The code, such as ``DDP201``."""
    name: str
    """The short name, such as ``desync``."""
    severity: Severity
    title: str
    """What the finding is, in one sentence without a final period."""
    symptoms: tuple[str, ...]
    """Messages that users see, verbatim; ``...`` stands for text that varies."""
    text: str
    """The whole page in Markdown."""
    is_general: bool = False
    """True if the page is about a message that does not name the cause; `explain` shows it, reports do not."""
    found_by: tuple[str, ...] = ("message",)
    """What reports the finding, of `FOUND_BY`; "message": nothing but its message, which `explain` looks up."""

    def matches(self, message: str) -> bool:
        """Return True if one of the symptoms is in `message`, ignoring line breaks."""
        return _longest_in(self, _on_line(message, any_case=False), any_case=False) > 0

    def section(self, heading: str) -> str:
        """Return the text under `heading`, of `SECTIONS` or an optional one; empty if the page does not have it."""
        return self.text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].strip()

    @property
    def first_fix(self) -> str:
        """The first fix of the page, on one line without its final punctuation."""
        first = self.section("How to fix it").partition("\n- ")[0].partition("\n\n")[0]
        return _on_one_line(first.removeprefix("- "))

    @property
    def main_cause(self) -> str:
        """The first paragraph on why it happens, on one line without its final punctuation."""
        return _on_one_line(self.section("Why it happens").partition("\n\n")[0])


@cache
def all_entries() -> tuple[Entry, ...]:
    """Return every page, sorted by code."""
    pages = [page for page in files(__package__).joinpath("pages").iterdir() if page.name.endswith(".md")]
    return tuple(parse_page(page.read_text("utf-8")) for page in sorted(pages, key=lambda page: page.name))


def find_entry(code_or_name: str) -> Entry:
    """Return the page of a code such as ``DDP201`` or ``201``, or of a name such as ``desync``.

    Raises `DdpilotError` for an unknown code or name; the error lists similar ones.
    """
    wanted = code_or_name.strip().lower()
    wanted = f"ddp{wanted}" if wanted.isdecimal() else wanted
    for entry in all_entries():
        if wanted in (entry.code.lower(), entry.name):
            return entry
    alike = [f"{entry.code} {entry.name}" for entry in all_entries() if _is_alike(wanted, entry)]
    raise DdpilotError(
        f"looking up {code_or_name!r}",
        found="no finding has this code or name",
        fix=(f"Similar: {', '.join(alike[:8])}. " if alike else "")
        + "Give the whole line of an error, in quotes; `ddpilot explain` lists all findings",
    )


def make_finding(
    code: str,
    *,
    summary: str = "",
    ranks: Sequence[int] = (),
    line: CodeLine | None = None,
    evidence: Sequence[str] = (),
    why: str | None = None,
    fix: str = "",
    severity: Severity | None = None,
) -> Finding:
    """Build a finding from the page of `code`: name and source, and severity, title, main cause and fix if not given.

    `line`: the line of the user's code to look at first.
    """
    entry = find_entry(code)
    return Finding(
        code=entry.code,
        name=entry.name,
        severity=severity or entry.severity,
        summary=summary or entry.title,
        ranks=tuple(ranks),
        place=line,
        evidence=tuple(evidence),
        why=entry.main_cause if why is None else why,
        fix=fix or entry.first_fix,
        source=how_to_open(entry.code),
    )


def how_to_open(code: str) -> str:
    """Return the command that prints the page of `code`, and the page's address if the project has one."""
    return " or ".join(filter(None, (f"ddpilot explain {code}", page_url(f"src/ddpilot/findings/pages/{code}.md"))))


def find_known(message: str) -> tuple[Entry, ...]:
    """Return the pages with a symptom in `message`, longest symptom first; general pages are excluded."""
    return _find_by_symptom(message, is_general=False, any_case=False)


def find_asked(message: str) -> tuple[Entry, ...]:
    """Return the pages about a message that a user asks about: those of `find_known`, then general pages.

    If no page matches, the search ignores case; if that fails too, it returns the pages with a symptom that contains
    `message` without the name of its exception, the page with the shortest such symptom first.
    """
    for any_case in (False, True):
        kinds = (_find_by_symptom(message, is_general=general, any_case=any_case) for general in (False, True))
        found = tuple(entry for kind in kinds for entry in kind)
        if found:
            return found
    part = _LABELS.sub("", " ".join(message.lower().split())).rstrip(". ")
    if len(part) < _MIN_PART_CHARS:
        return ()
    lengths = {
        entry: min((len(symptom) for symptom in entry.symptoms if part in symptom.lower()), default=0)
        for entry in all_entries()
    }
    return tuple(sorted((entry for entry in all_entries() if lengths[entry]), key=lambda entry: lengths[entry]))


def _find_by_symptom(message: str, *, is_general: bool, any_case: bool) -> tuple[Entry, ...]:
    words = _on_line(message, any_case=any_case)  # once: a log of a job may have many megabytes
    candidates = [entry for entry in all_entries() if entry.is_general is is_general]
    lengths = {entry.code: _longest_in(entry, words, any_case=any_case) for entry in candidates}
    found = [entry for entry in candidates if lengths[entry.code]]
    return tuple(sorted(found, key=lambda entry: -lengths[entry.code]))


def find_cause(error: str, lines: Sequence[str]) -> tuple[Entry, ...]:
    """Return the pages that explain why a process ended.

    `error`: the text of the exception that it raised, if any. `lines`: the last lines that it wrote. The lines are
    searched if there was no exception, or if the exception only reports that a child process ended; pages found in
    the lines then replace those of the exception.
    """
    known = find_known(error)
    if error and not is_of_child(error):
        return known
    of_lines = [entry for entry in find_known("\n".join(lines)) if entry.severity == "error" or not error]
    return tuple(entry for entry in of_lines if entry not in known) or known


def is_of_child(error: str) -> bool:
    """Return True if this error only reports that a child process ended, not why."""
    return _OF_CHILD.search(error) is not None


def parse_page(text: str) -> Entry:
    """Parse a page into an entry. Raises `DdpilotError` if the page does not have the required title and headings."""
    lines = [line for line in text.splitlines() if not line.startswith("<!--")]
    title = _TITLE.match(lines[0]) if lines else None
    severity = lines[1].removeprefix("severity: ") if len(lines) > 1 else ""
    headings = tuple(line.removeprefix("## ") for line in lines if line.startswith("## "))
    named = [line.removeprefix(_FOUND_BY).split(", ") for line in lines[:4] if line.startswith(_FOUND_BY)]
    found_by = tuple(named[0]) if named else ("message",)
    is_known = severity in get_args(Severity) and set(found_by) <= set(FOUND_BY)
    if title is None or not is_known or headings not in _HEADINGS:
        raise DdpilotError(
            f"reading the page that begins with {lines[:2]}",
            found=f"headings {headings}, found by {found_by}",
            fix=f"Begin with '# DDPnnn name: title', 'severity: ...', 'found by: ...'; then {', '.join(SECTIONS)}",
        )
    seen = "\n".join(lines).partition("\n## What you see\n")[2].partition("\n## ")[0]
    return Entry(
        code=title["code"],
        name=title["name"],
        severity=cast(Severity, severity),
        title=title["title"],
        symptoms=tuple(found["text"] for found in _SYMPTOM.finditer(seen)),
        text="\n".join(line for line in lines if line != _GENERAL and not line.startswith(_FOUND_BY)).strip() + "\n",
        is_general=lines[2] == _GENERAL,
        found_by=found_by,
    )


@cache
def _patterns(symptoms: tuple[str, ...], any_case: bool) -> tuple[re.Pattern[str], ...]:
    gap = f".{{0,{_MAX_GAP_CHARS}}}?"
    parts = (
        [re.escape(_on_line(part, any_case=any_case)) for part in symptom.strip(". ").split(_GAP)]
        for symptom in symptoms
    )
    return tuple(re.compile(gap.join(each) + (r"(?!\d)" if each[-1][-1:].isdigit() else "")) for each in parts)


def _on_line(message: str, *, any_case: bool) -> str:
    """Return `message` on one line; with `any_case` in lower case, which is searched faster than with IGNORECASE."""
    words = " ".join(message.split())
    return words.lower() if any_case else words


def _longest_in(entry: Entry, words: str, *, any_case: bool) -> int:
    """Return the length of the longest symptom of `entry` in `words`, which `_on_line` returned; 0 if there is none."""
    hits = zip(entry.symptoms, _patterns(entry.symptoms, any_case), strict=True)
    return max((len(symptom) for symptom, pattern in hits if pattern.search(words)), default=0)


def _is_alike(wanted: str, entry: Entry) -> bool:
    digits = wanted.removeprefix("ddp")
    if digits.isdecimal():
        return entry.code[3] == digits[0]
    return any(word in entry.name for word in re.split(r"[\W_]+", wanted) if len(word) > 2)


def fix_in_rank(entry: Entry) -> str:
    """Return the first fix that applies inside a rank, on one line without its final punctuation."""
    return _on_one_line(entry.section(IN_RANK)) or entry.first_fix


def _on_one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".:")
