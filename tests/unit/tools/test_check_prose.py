# SPDX-License-Identifier: Apache-2.0
"""The prose check: what it finds, what it leaves alone, and where."""

from __future__ import annotations

from tools.check_prose import MAX_WORDS, check_docstrings, check_page, check_terms


def test_check_page_finds_a_phrase_with_its_line() -> None:
    """Of prose only: code, fences and comments may have any words."""
    page = "# Resume\n\n`nobody`\n<!-- anew -->\n```text\ngoes on\n```\n\nTraining goes on.\n"
    (fault,) = check_page("page.md", page)
    assert (fault.kind, fault.place, fault.text) == ("phrase in pages", "page.md:9", "goes on")


def test_check_page_finds_long_sentences_and_headings() -> None:
    """A sentence of exactly the limit passes, one word more does not; a heading is no sentence."""
    short, long = " ".join(["word"] * MAX_WORDS), " ".join(["word"] * (MAX_WORDS + 1))
    assert list(check_page("page.md", f"# Hang\n\n{short}. {short}.\n")) == []
    assert [fault.kind for fault in check_page("page.md", f"{long}.\n")] == ["long sentence in pages"]
    assert [fault.kind for fault in check_page("page.md", "# Why does it hang?\n")] == ["heading in pages"]


def test_check_page_ends_sentences_at_cells_and_items() -> None:
    """A table or a list is not one long sentence."""
    cell = " ".join(["word"] * (MAX_WORDS - 1))
    assert list(check_page("page.md", f"| {cell} | {cell} |\n|---|---|\n\n- {cell}\n- {cell}\n")) == []


def test_check_docstrings_reads_docstrings_alone() -> None:
    """Neither names nor strings of the code."""
    source = 'def f():\n    """Nobody knows: nobody."""\n    anew = "goes on"\n'
    assert [(fault.place, fault.text) for fault in check_docstrings("m.py", source)] == [("m.py:2", "nobody")]


def test_check_terms_wants_each_word_in_the_glossary() -> None:
    """A row with two words explains both."""
    missing = {fault.text for fault in check_terms("| probe, rule | code |  |\n| watch | observing | |\n")}
    assert "guard" in missing
    assert not missing & {"probe", "watch"}
