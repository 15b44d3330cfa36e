# SPDX-License-Identifier: Apache-2.0
"""`ddpilot explain`: by code, by name, by message, and the list."""

from __future__ import annotations

import pytest

from ddpilot.cli.explain_verb import explain
from ddpilot.errors import DdpilotError
from ddpilot.findings.catalog import all_entries

UNUSED = "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. It"


@pytest.mark.parametrize("words", ["DDP308", "308", "unused-parameters", UNUSED])
def test_explain_prints_the_page(words: str) -> None:
    """Code, number, name and message lead to the same page."""
    assert explain(words).startswith("# DDP308 unused-parameters: ")


def test_explain_lists_every_page_without_words() -> None:
    """One line for each."""
    assert explain("").count("\n") == len(all_entries())


def test_explain_refuses_a_message_that_no_page_knows() -> None:
    """It says which message, shortened."""
    with pytest.raises(DdpilotError, match="no page knows 'xyz xyz xyz .*\\.\\.\\.'"):
        explain("xyz " * 200)
