# SPDX-License-Identifier: Apache-2.0
"""Check the prose of README, docs, finding pages and docstrings: `make check`; `--list` prints every place.

Three counts may only fall: phrases that read as translated (CONTRIBUTING.md has what to write instead), sentences of
more than `MAX_WORDS` words, and headings that are questions or end in a full stop. `ALLOWED` has the numbers that were
reached; lower one when its count is lower. The words of `OWN_WORDS` have to be in docs/glossary.md.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_WORDS = 40

ALLOWED = {
    "phrase in pages": 4,
    "phrase in src": 0,
    "long sentence in pages": 3,
    "heading in pages": 0,
}
"""What was reached; a higher count fails, and a lower one asks for a lower number here."""

PHRASES = (
    r"anew\b",
    r"nobody\b",
    r"whoever\b",
    r"goes? on\b(?! each rank)",
    r"went on\b",
    r"is (?:said|told)\b",
    r"are (?:said|told)\b",
    r"(?:says?|tells?) nothing\b",
    r"none (?:gets|get|where|of which)\b",
    r"where there (?:is|are) (?:none|no)\b",
    r"beside\b",
    r"bears? (?:it|this) out\b",
    r"(?:went|goes) round\b",
    r"is no (?:longer an? )?(?!longer|more|other)[a-z]+ of\b",
    r"of (?:yours|its) own word\b",
    r"without a word\b",
    r"so many [^.|\n]{0,40} that\b",
    r"how manieth\b",
    r"Python's lock\b",
    r"Right is:",
    r"those of (?:it|them)\b",
    r"what that raises\b",
    r"the others are not there\b",
    r"learnt\b",
    r"remarked on\b",
    r"get(?:s|ting)? on\b(?! (?:rank|the|a|all|each|every|one|CPU|GPU))",
    r"is made again\b",
    r"has come to (?:its|an) end\b",
)
"""Translated English, each with the group that made it: see the list of phrases in CONTRIBUTING.md."""
PHRASE = re.compile(r"\b(?:" + "|".join(PHRASES) + ")")

OWN_WORDS = (
    *(
        "app",
        "finding",
        "flight ring",
        "global batch",
        "guard",
        "journal",
        "observer",
        "parcel",
        "probe",
        "rank server",
    ),
    *("rank zero", "session", "status line", "topology", "victim", "watch"),
)
"""Words to which ddpilot gives a meaning of its own."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One place to rewrite: `kind` is a key of `ALLOWED`, or "term"."""

    kind: str
    place: str
    text: str


def strip_code(text: str) -> str:
    """Return Markdown without fences, comments, code in backticks and targets of links; lines keep their numbers."""
    blank = re.compile(r"^```.*?^```$|<!--.*?-->", re.MULTILINE | re.DOTALL)
    text = blank.sub(lambda found: "\n" * found[0].count("\n"), text)
    text = re.sub(r"``[^`]+``|`[^`\n]+(?:\n[^`\n]+)?`", lambda found: "X" + "\n" * found[0].count("\n"), text)
    return re.sub(r"\]\([^)]*\)|https?://\S+", "]", text)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, sentence) of stripped Markdown. Cells of tables, list items and headings end sentences."""
    text = re.sub(r"^#+ .*$", "", text, flags=re.MULTILINE)
    for block in re.finditer(r"(?:.+\n?)+", text):
        line = text.count("\n", 0, block.start()) + 1
        for piece in re.split(r"(?<=[.!?:;])\**\s+|<br>|\s*\|\s*|\n(?=\s*(?:[-*#>|]|\d+\.) )", block[0]):
            if piece:
                yield line, " ".join(piece.split())
            line += piece.count("\n")


def check_page(name: str, markdown: str) -> Iterator[Fault]:
    """Yield the faults of a page."""
    text = strip_code(markdown)
    for found in PHRASE.finditer(text):
        yield Fault(kind="phrase in pages", place=f"{name}:{text.count(chr(10), 0, found.start()) + 1}", text=found[0])
    for line, sentence in sentences(text):
        if len(re.findall(r"[A-Za-z][\w'-]*", sentence)) > MAX_WORDS:
            yield Fault(kind="long sentence in pages", place=f"{name}:{line}", text=sentence)
    for found in re.finditer(r"^#+ (.*[.?!])$", text, re.MULTILINE):
        place = f"{name}:{text.count(chr(10), 0, found.start()) + 1}"
        yield Fault(kind="heading in pages", place=place, text=found[1])


def check_docstrings(name: str, source: str) -> Iterator[Fault]:
    """Yield the phrases in the docstrings of a module, also those under fields and constants."""
    for node in ast.walk(ast.parse(source)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text:
            for found in PHRASE.finditer(strip_code(node.value.value)):  # type: ignore[attr-defined]
                yield Fault(kind="phrase in src", place=f"{name}:{node.lineno}", text=found[0])  # type: ignore[attr-defined]


def check_terms(glossary: str) -> Iterator[Fault]:
    """Yield the words of ddpilot's own that the glossary does not explain."""
    explained = set(re.findall(r"^\| ([^|]+?) \|", glossary, re.MULTILINE))
    words = {word.strip() for entry in explained for word in entry.split(",")}
    yield from (Fault(kind="term", place="docs/glossary.md", text=word) for word in OWN_WORDS if word not in words)


def find_faults(root: Path) -> list[Fault]:
    """Return all faults of the checkout `root`."""
    faults = list(check_terms((root / "docs" / "glossary.md").read_text()))
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "src/ddpilot/findings/pages").glob("*.md")]
    for path in sorted(pages):
        if path.parent.name != "reference":  # made of the docstrings
            faults += check_page(path.relative_to(root).as_posix(), path.read_text())
    for path in sorted((root / "src").rglob("*.py")):
        faults += check_docstrings(path.relative_to(root).as_posix(), path.read_text())
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts, and the places of those that are too high; return 1 if one is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every place, also if no count is too high")
    options = parser.parse_args(argv)
    faults, status = find_faults(ROOT), 0
    for kind, allowed in {**ALLOWED, "term": 0}.items():
        found = [fault for fault in faults if fault.kind == kind]
        print(f"{kind}: {len(found)}, allowed {allowed}" + (": lower the number" if len(found) < allowed else ""))
        if len(found) > allowed or options.list:
            for fault in found:
                print(f"  {fault.place}: {fault.text}")
        status |= len(found) > allowed
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
