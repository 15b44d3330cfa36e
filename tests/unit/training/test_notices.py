# SPDX-License-Identifier: Apache-2.0
"""The note of the first failure of a job that requeues."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddpilot.errors import RemoteRankError
from ddpilot.launching.rank_environment import FAILURE_FILE_VARIABLE
from ddpilot.training import notices
from ddpilot.training.notices import note_failures, render_failure


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the note, named as a job script names it."""
    monkeypatch.setenv(FAILURE_FILE_VARIABLE, str(tmp_path / "failure"))
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(notices, "_VICTIM_WAIT_S", 0.0)
    return tmp_path / "failure"


def test_failure_is_one_line_without_addresses() -> None:
    """So that the same error at the same update gives the same text."""
    error = ValueError("bad <object at 0x7f2b3c13d4e0>\nin a line of its own")
    assert render_failure(7, error) == "after 7 updates: ValueError: bad <object at 0x...> in a line of its own\n"


def test_first_rank_writes_the_note(path: Path) -> None:
    """A later one leaves it as it is."""
    note_failures(lambda: 7)
    for error in (ValueError("first"), KeyError("second")):
        sys.excepthook(type(error), error, None)
    assert path.read_text() == "after 7 updates: ValueError: first\n"


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        RemoteRankError("calling f()", found="rank 0 raised"),
        RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:35538"),
    ],
)
def test_consequences_of_another_failure_are_not_noted(path: Path, error: BaseException) -> None:
    """The rank that has the cause writes it."""
    note_failures(lambda: 7)
    sys.excepthook(type(error), error, None)
    assert not path.exists()


def test_nothing_is_noted_outside_of_such_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook of exceptions stays what it was."""
    monkeypatch.delenv(FAILURE_FILE_VARIABLE, raising=False)
    before = sys.excepthook
    note_failures(lambda: 7)
    assert sys.excepthook is before
