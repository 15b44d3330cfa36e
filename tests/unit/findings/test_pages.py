# SPDX-License-Identifier: Apache-2.0
"""All pages: one form, short sentences, code that compiles, and code that the linter agrees with."""

from __future__ import annotations

import ast
import builtins
import re

from ddpilot.findings.catalog import OTHER_CAUSES, SECTIONS, Entry, all_entries, find_entry
from ddpilot.findings.page import FOOTER_HEADING, NAMES, blocks_of, full_text, render_page
from ddpilot.lint.linter import LintOptions, lint_text
from ddpilot.lint.rules import CODES
from tests.each import for_each

LANGUAGES = {"python", "console", "bash"}
MAX_WORDS = 30
MAX_LINES = 24
NEEDS_CELLS = {
    "DDP112": "the rule is about notebooks; its fixtures are notebooks",
}
"""Findings of the linter whose wrong block is not a script, with the reason."""
GIVEN = {
    *("dist", "DDP", "torch", "nn", "F", "os", "np", "ddpilot", "time", "random", "contextlib", "DataLoader", "Subset"),
    *("DistributedSampler", "Join", "rank", "local_rank", "world_size", "device", "group", "model", "net", "optimizer"),
    *("loader", "val_loader", "dataset", "val_dataset", "batches", "x", "y", "loss", "loss_fn", "tensor", "epoch"),
    *("num_epochs", "step", "path", "loop", "args", "num_classes", "config", "cfg"),
}
"""Names that a block may use without defining them: modules by their usual names, and what training scripts have."""


def sentences_of(text: str) -> list[str]:
    """The sentences of Markdown, without blocks of code; code in a line counts as one word."""
    prose = re.sub(r"^```.*?^```$|^#[^\n]*$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for paragraph in re.split(r"\n\s*\n|\n(?=- )", prose):
        words = re.sub(r"`[^`]*`", "`CODE`", " ".join(paragraph.split()))
        found += [each for each in re.split(r"(?<=[.!?])\s+(?=[A-Z`(])", words) if each]
    return found


@for_each(all_entries(), lambda entry: entry.code)
def test_page_has_wrong_and_right_code(entry: Entry) -> None:
    """A block of each, of a known language and short enough to read."""
    for heading in ("Wrong", "Right"):
        blocks = blocks_of(entry, heading)
        assert blocks, heading
        for language, text in blocks:
            assert language in LANGUAGES
            assert 1 <= len(text.splitlines()) <= MAX_LINES
            assert all(len(line) <= 120 for line in text.splitlines())
        assert not re.search(r"^## ", "".join(text for _, text in blocks), re.MULTILINE)
    assert entry.section("Wrong") != entry.section("Right")


@for_each(all_entries(), lambda entry: entry.code)
def test_python_of_a_page_compiles_and_uses_known_names(entry: Entry) -> None:
    """No block has a misspelt name: what it does not define is among the names that all blocks share."""
    for heading in SECTIONS:
        for language, text in blocks_of(entry, heading):
            if language == "python":
                compile(text, f"{entry.code} {heading}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                assert unknown_in(ast.parse(text)) == set(), heading


def unknown_in(tree: ast.Module) -> set[str]:
    """The names that a block reads and nothing in it binds."""
    bound: set[str] = set(dir(builtins))
    read: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update((each.asname or each.name).partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read - bound - GIVEN


@for_each(all_entries(), lambda entry: entry.code)
def test_cause_is_one_short_sentence(entry: Entry) -> None:
    """A report quotes it as `why:`."""
    (sentence,) = sentences_of(entry.section("Why it happens").partition("\n\n")[0])
    assert len(sentence.split()) <= MAX_WORDS


@for_each(all_entries(), lambda entry: entry.code)
def test_sentences_are_short(entry: Entry) -> None:
    """In all sections."""
    long = [each for each in sentences_of(entry.text) if len(each.split()) > MAX_WORDS]
    assert long == []


@for_each(all_entries(), lambda entry: entry.code)
def test_title_is_capitalised_and_sources_are_links(entry: Entry) -> None:
    """A page of ours is no source."""
    assert entry.title[0].isupper() or entry.title.startswith(("`", "'"))
    assert not entry.title.endswith(".")
    sources = [line for line in entry.section("Sources").splitlines() if line.startswith("- ")]
    assert sources
    assert all("https://" in line for line in sources)
    assert "docs/" not in re.sub(r"https://\S+", "", entry.text)


@for_each(sorted(set(CODES) - set(NEEDS_CELLS)))
def test_linter_reports_the_wrong_code(code: str) -> None:
    """Each wrong block has the fault."""
    for _, text in blocks_of(find_entry(code), "Wrong"):
        assert code in {each.code for each in lint_text(text, "train.py", LintOptions())}


@for_each(all_entries(), lambda entry: entry.code)
def test_linter_is_silent_on_right_code(entry: Entry) -> None:
    """No right block has this fault or a different one."""
    for language, text in blocks_of(entry, "Right"):
        if language == "python":
            assert [each.code for each in lint_text(text, "train.py", LintOptions())] == []


@for_each(all_entries(), lambda entry: entry.code)
def test_page_names_what_reports_the_finding(entry: Entry) -> None:
    """The linter exactly; the footer has a command for each, once."""
    assert ("lint" in entry.found_by) == (entry.code in CODES)
    whole = full_text(entry)
    assert whole.count(f"## {FOOTER_HEADING}\n") == 1
    assert ("DDPILOT_WATCH=1 torchrun" in whole) == ("watch" in entry.found_by)
    assert whole.index(FOOTER_HEADING) < whole.index("\n## Sources\n")
    assert whole.count(NAMES) <= 1


@for_each(all_entries(), lambda entry: entry.code)
def test_page_in_a_terminal_has_no_fences(entry: Entry) -> None:
    """Code is indented; only a terminal with colors gets escapes."""
    shown = render_page(entry)
    assert "```" not in shown
    assert "\x1b" not in shown
    for _, text in blocks_of(entry, "Wrong"):
        assert "\n".join(f"    {line}".rstrip() for line in text.splitlines()) in shown


def test_page_with_colors_is_the_same_text() -> None:
    """Wrong is red, right is green, and code is highlighted."""
    entry = find_entry("DDP201")
    colored = render_page(entry, color=True)
    assert "\x1b[1;31m## Wrong\x1b[0m" in colored
    assert "\x1b[1;32m## Right\x1b[0m" in colored
    plain = re.sub(r"\x1b\[[\d;]*m", "", colored)
    assert [line.rstrip() for line in plain.splitlines()] == [line.rstrip() for line in render_page(entry).splitlines()]


def test_other_causes_stand_behind_the_fix() -> None:
    """Optional headings keep their place."""
    headings = [line[3:] for line in find_entry("DDP118").text.splitlines() if line.startswith("## ")]
    assert headings == [*SECTIONS[:-1], OTHER_CAUSES, SECTIONS[-1]]
