# SPDX-License-Identifier: Apache-2.0
"""Turn a rank's error into a finding if the catalog has a page for the message, with the user's line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddpilot.findings.catalog import SHIP_ERROR, Entry, find_cause, find_known, make_finding
from ddpilot.findings.finding import Finding, Place
from ddpilot.findings.in_ranks import fix_in_rank
from ddpilot.launching.crash import find_raised_line
from ddpilot.user_files import is_users_line
from ddpilot.watch.snapshot.model import ErrorView

_FAULT_FRAME = re.compile(
    r'^  (?:File "(?P<file>[^"]+)"|(?P<cell>Cell In\[\d+\])), line (?P<line>\d+) in (?P<function>.+)$'
)
_NEXT_IN_CHAIN = re.compile(
    r"^(?:The above exception was the direct cause of the following exception:"
    r"|During handling of the above exception, another exception occurred:)$",
    re.MULTILINE,
)
_MAX_MESSAGE_CHARS = 200
_SAID_OF_DESYNC = frozenset({"DDP201", "DDP202", "DDP203", "DDP218", "DDP603"})
"""Pages of errors that gloo, NCCL and unpickling raise if ranks disagree; the messages do not name the cause."""
_OF_CONSTRUCTION = frozenset({"DDP301", "DDP302", "DDP303", "DDP304"})
"""Codes of models that differ between ranks: torch counts parameters frozen on one rank as missing there."""
_OF_MEETING = frozenset({"DDP103", "DDP104"})
"""Pages about why a rank could not reach the rendezvous: a port in use, a wrong address."""
_OF_WAITS = frozenset({"DDP208", "DDP209", "DDP215"})
"""Codes of findings about ranks that wait for a rank that could not reach the rendezvous."""


def find_known_error(rank: int, error: ErrorView | None, last_lines: Sequence[str] = ()) -> Finding | None:
    """Return the finding for how `rank` ended: by its exception, or else by the last lines of its output.

    None if no page matches, and for ddpilot's ShipError, whose message is more specific than its page.
    """
    if error is not None and error.type_name == SHIP_ERROR:
        return None
    said = f"{error.type_name}: {error.message}" if error is not None else ""
    traceback = error.traceback if error is not None else ""
    known = find_cause(said, last_lines)
    if not known:
        known, said, traceback = _find_in_chain(traceback)
    elif not known[0].matches(said):  # a child process of the rank, or C++ code, wrote the message
        said = next((line for line in reversed(last_lines) if known[0].matches(line)), "\n".join(last_lines))
    if not known:
        return None
    entry = known[0]
    return make_finding(
        entry.code,
        ranks=(rank,),
        line=_find_place(traceback) or _find_crash_place(last_lines),
        evidence=(_shorten(said),),
        why=" ".join(entry.section("What it means").partition("\n\n")[0].split()),
        fix=f"{fix_in_rank(entry)}.",
    )


def _find_in_chain(traceback: str) -> tuple[tuple[Entry, ...], str, str]:
    """Return pages, text and traceback of the last exception in the chain, before the raised one, with a page."""
    parts = _NEXT_IN_CHAIN.split(traceback)[:-1]
    for part in reversed(parts):
        said = part.strip().rpartition("\n  ")[2].partition("\n")[2]
        known = tuple(entry for entry in find_known(said) if entry.severity == "error")
        if known:
            return known, said, part
    return (), "", ""


def put_first(known: Finding, findings: list[Finding]) -> str:
    """Insert `known` at the front of `findings`, unless these explain it.

    Returns the fix of a finding if it is more specific than that of the message; empty otherwise.
    """
    if not is_explained(known, findings):
        findings.insert(0, known)
    better = (each.fix for each in findings if known.code != each.code and {known.code, each.code} <= _OF_CONSTRUCTION)
    return next(better, "")


def is_explained(known: Finding, recorded: Sequence[Finding]) -> bool:
    """Return True if `known`, the page of an error message, adds nothing to the findings `recorded`.

    A closed connection is a consequence of a recorded cause; a port in use is a cause itself.
    """
    codes = {finding.code for finding in recorded}
    if known.code == "DDP209" or known.code in codes:
        return True
    if known.code in _OF_CONSTRUCTION:
        return not codes.isdisjoint(_OF_CONSTRUCTION)
    if known.code == "DDP308":
        return not codes.isdisjoint({"DDP212", "DDP310"})
    has_cause = any(code.startswith(("DDP2", "DDP30")) and code != "DDP209" for code in codes)
    return known.code in _SAID_OF_DESYNC and has_cause


def without_waits(findings: Sequence[Finding], known: Finding | None) -> list[Finding]:
    """Drop findings about waiting ranks if `known` says that a rank could not reach them."""
    is_of_meeting = known is not None and known.code in _OF_MEETING
    return [each for each in findings if not (is_of_meeting and each.code in _OF_WAITS)]


def _find_place(traceback: str) -> Place | None:
    """Return the innermost line outside of installed libraries; in a chain of exceptions, that of the last one."""
    raised = find_raised_line(traceback)
    return None if raised is None else Place(**raised._asdict())


def _find_crash_place(lines: Sequence[str]) -> Place | None:
    """Return the innermost user line of the output of Python's fault handler, which lists the innermost call first."""
    called = ""
    for frame in filter(None, map(_FAULT_FRAME.match, lines)):
        file = frame["file"] or frame["cell"]
        if is_users_line(file, frame["function"], called):
            return Place(file=file, line=int(frame["line"]), function=frame["function"])
        called = file
    return None


def _shorten(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[: _MAX_MESSAGE_CHARS - 3]}..."
