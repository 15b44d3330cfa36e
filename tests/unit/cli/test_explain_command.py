# SPDX-License-Identifier: Apache-2.0
"""`ddpilot explain`: by code, by name, by message, and the list."""

from __future__ import annotations

import re

import pytest

from ddpilot.cli.explain_command import _SUBJECTS, explain, find_fitting
from ddpilot.errors import DdpilotError
from ddpilot.findings.catalog import all_entries, find_entry

UNUSED = "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. It"


@pytest.mark.parametrize("words", ["DDP308", "308", "unused-parameters", UNUSED])
def test_explain_prints_the_page(words: str) -> None:
    """Code, number, name and message lead to the same page."""
    assert explain(words).startswith("# DDP308 unused-parameters: ")


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("ChildFailedError", "child-failed"),
        ("Signal 9 (SIGKILL)", "killed"),
        ("exitcode: -9", "killed"),
        ("exitcode  : -11 (pid: 12)", "crashed"),
        ("CUDA out of memory", "device-out-of-memory"),
        ("cuda out of memory", "device-out-of-memory"),
        ("ncclUnhandledCudaError", "nccl-error"),
        ("unhandled system error", "nccl-error"),
        ("DistBackendError", "nccl-error"),
        ("store based barrier", "rendezvous-incomplete"),
        ("Broken pipe", "broken-pipe"),
        ("RendezvousConnectionError", "bad-master-addr"),
        ("EADDRINUSE", "port-in-use"),
        ("device-side assert", "device-side-assert"),
        ("Some NCCL operations have failed or timed out", "missing-rank"),
        ("SIGTERM", "child-failed"),
        ("SIGKILL", "killed"),
        ("sigsegv", "crashed"),
        ("SIGABRT", "crashed"),
        ("SIGBUS", "crashed"),
    ],
)
def test_explain_knows_the_usual_messages(message: str, name: str) -> None:
    """The whole name, a part, within a word, and in upper case."""
    assert explain(message).split()[2] == f"{name}:"


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("hang", "DDP218"),
        ("stuck", "DDP218"),
        ("My training hangs!", "DDP218"),
        ("nan", "DDP409"),
        ("loss is NaN", "DDP409"),
        ("slow", "DDP217"),
        ("port in use", "DDP103"),
        ("oom", "DDP703"),
        ("wrong accuracy", "DDP401"),
    ],
)
def test_explain_lists_the_pages_that_fit_plain_words(words: str, first: str) -> None:
    """The likeliest first, a line each, and how to go on."""
    said = explain(words)
    assert said.splitlines()[2].startswith(f"{first}  ")
    assert f"`ddpilot explain {first}` prints one" in said


def test_plain_words_have_pages_and_a_long_text_is_a_message() -> None:
    """Every subject names pages that exist; words within a long text are no question."""
    for _, pattern, numbers in _SUBJECTS:
        re.compile(pattern)
        assert all(find_entry(f"DDP{number}") for number in numbers)
    assert find_fitting("it was stuck " * 9) == ()


def test_explain_lists_every_page_without_words() -> None:
    """One line for each, then where to look by symptom."""
    lines = explain("").splitlines()
    assert lines.index("") == len(all_entries())
    assert "docs/faq.md has a command for each symptom" in lines[-1]


def test_explain_refuses_a_message_that_no_page_knows() -> None:
    """It quotes the message, shortened."""
    with pytest.raises(DdpilotError, match="no page matches 'xyz xyz xyz .*\\.\\.\\.'"):
        explain("xyz " * 200)


def test_explain_ends_with_the_address_of_the_page_if_the_project_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the page alone is printed."""
    assert explain("DDP201") == find_entry("DDP201").text
    monkeypatch.setattr("ddpilot._project.PROJECT_URL", "https://example.org/ddpilot")
    assert explain("DDP201").endswith("\nhttps://example.org/ddpilot/blob/main/src/ddpilot/findings/pages/DDP201.md\n")
    assert "https://example.org/ddpilot/blob/main/docs/faq.md has a command" in explain("")
