# SPDX-License-Identifier: Apache-2.0
"""Errors in a probe do not affect training."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpilot.guard import hook
from ddpilot.guard.probe import Notes
from ddpilot.record.call_sites import SiteFinder
from ddpilot.record.journal import JournalWriter, read_journal


class Target:
    """An object that a probe observes."""

    def double(self, number: int) -> int:
        """Twice `number`; refuses a negative one."""
        if number < 0:
            raise ValueError("negative")
        return 2 * number

    def warn(self) -> None:
        """About the line that calls it."""
        warnings.warn("double it by yourself", FutureWarning, stacklevel=2)


class CountingProbe:
    """Notes calls of `Target.double`."""

    name = "doubling"

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        """As `Probe.install`."""

        def doubled(_: object, result: int, *__: object) -> None:
            notes.write("call", {"r": result})

        def raised(*_: object) -> None:
            notes.write("call", {"r": None})

        return [notes.around(Target, "double", returned=doubled, raised=raised)]


class FailingProbe:
    """Fails when it is needed."""

    name = "failing"

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        """As `Probe.install`."""

        def fail(*_: object) -> None:
            raise RuntimeError("a mistake of ours")

        return [notes.around(Target, "double", before=fail, after=fail)]


class NeverInstalled:
    """Fails at once."""

    name = "never"

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        """As `Probe.install`."""
        raise OSError(f"not here: {notes.name}")


def names(*probes: type) -> list[str]:
    """Names as in the registry."""
    return [f"{probe.__module__}:{probe.__qualname__}" for probe in probes]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probes of this file, whatever name pytest has imported it by."""
    monkeypatch.setattr(hook, "resolve_name", lambda name: globals()[name.partition(":")[2]])


@pytest.mark.usefixtures("loaded")
def test_install_sees_calls_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Results and exceptions are unchanged; afterwards the method is the original."""
    original = Target.double
    stop = hook.install(tmp_path / "journal", rank=0, probes=names(CountingProbe))
    assert Target().double(4) == 8
    with pytest.raises(ValueError, match="negative"):
        Target().double(-1)
    assert Target.double.__name__ == "double"
    stop()
    assert Target.double is original
    kept = read_journal(tmp_path / "journal")
    assert [entry.values for entry in kept.entries] == [{"r": 8}, {"r": None}]
    assert kept.closed_ns is not None


@pytest.mark.usefixtures("loaded")
def test_install_switches_a_failing_probe_off_and_says_so_once(tmp_path: Path) -> None:
    """Calls return as before, the other probe continues, and the fault is in the journal."""
    said: list[str] = []
    probes = names(NeverInstalled, FailingProbe, CountingProbe)
    stop = hook.install(tmp_path / "journal", rank=0, probes=probes, report=said.append)
    assert [Target().double(number) for number in range(3)] == [0, 2, 4]
    stop()
    assert said == [
        "guard no longer looks at never: OSError: not here: never",
        "guard no longer looks at failing: RuntimeError: a mistake of ours",
    ]
    kinds = [entry.kind for entry in read_journal(tmp_path / "journal").entries]
    assert kinds == ["fault", "fault", "call", "call", "call"]


def test_several_probes_share_one_wrapper(tmp_path: Path) -> None:
    """The newest hook runs first before and last after; each undo removes its own, the last one the wrapper."""
    original = Target.double
    seen: list[str] = []
    journal = JournalWriter(tmp_path / "journal", rank=0)
    finder = SiteFinder(torch="/nowhere")

    def wrap(name: str) -> Callable[[], None]:
        notes = Notes(name, journal, rank=0, finder=finder, report=seen.append)
        before, after = (lambda *_: seen.append(f"{name}:")), (lambda *_: seen.append(f":{name}"))
        return notes.around(Target, "double", before=before, after=after)

    undo = [wrap("first"), wrap("second")]
    assert Target.double.__wrapped__ is original  # type: ignore[attr-defined]
    Target().double(1)
    assert seen == ["second:", "first:", ":first", ":second"]
    undo[0]()
    Target().double(1)
    assert seen[4:] == ["second:", ":second"]
    undo[1]()
    assert Target.double is original
    journal.close()


def test_a_warning_of_what_is_looked_at_names_the_users_line(tmp_path: Path) -> None:
    """As without guard; a second line with the same warning is warned about too."""
    journal = JournalWriter(tmp_path / "journal", rank=0)
    notes = Notes("warnings", journal, rank=0, finder=SiteFinder(torch="/nowhere"), report=print)
    undo = notes.around(Target, "warn", before=lambda *_: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            Target().warn()
        Target().warn()
    undo()
    journal.close()
    here = test_a_warning_of_what_is_looked_at_names_the_users_line.__code__
    assert [(each.filename, each.lineno - here.co_firstlineno) for each in caught] == [(__file__, 8), (__file__, 9)]


@pytest.mark.usefixtures("loaded")
def test_uninstalling_spares_a_wrapper_that_came_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper of other code around ours stays, and ours does nothing any more."""
    monkeypatch.setattr(Target, "double", Target.double)
    stop = hook.install(tmp_path / "journal", rank=0, probes=names(CountingProbe))
    ours = Target.double

    def theirs(self: Target, number: int) -> int:
        return ours(self, number) + 1

    monkeypatch.setattr(Target, "double", theirs)
    stop()
    assert Target().double(1) == 3
    assert read_journal(tmp_path / "journal").entries == ()


def test_notes_survive_a_journal_that_fails(tmp_path: Path) -> None:
    """An error while writing is an error of the probe."""
    said: list[str] = []
    journal = JournalWriter(tmp_path / "journal", rank=0)
    finder = SiteFinder(torch="/nowhere")
    notes = Notes("things", journal, rank=0, finder=finder, report=said.append)
    look = notes.safely(lambda value: notes.write("thing", {"value": value}))
    look(object())
    look(1)
    assert notes.is_off
    assert len(said) == 1
    assert "not JSON serializable" in said[0]


def test_a_probe_that_fails_while_stderr_is_closed_is_in_the_journal(tmp_path: Path) -> None:
    """The line cannot be printed; training continues and the watch can still read why."""
    journal = JournalWriter(tmp_path / "journal", rank=0)
    closed = io.StringIO()
    closed.close()
    finder = SiteFinder(torch="/nowhere")
    notes = Notes("things", journal, rank=0, finder=finder, report=lambda line: print(line, file=closed))
    notes.safely(lambda: 1 / 0)()
    assert notes.is_off
    (entry,) = read_journal(tmp_path / "journal").entries
    assert entry.values == {"probe": "things", "text": "ZeroDivisionError: division by zero"}


@pytest.mark.parametrize("environ", [{}, {"DDPILOT_RING_DIR": "here", "DDPILOT_GUARD": "0"}])
def test_start_does_nothing_where_guard_is_off(tmp_path: Path, environ: dict[str, str]) -> None:
    """Without a folder, and if it is disabled."""
    if environ:
        environ = environ | {"DDPILOT_RING_DIR": str(tmp_path)}
    hook.start(RankStart(environ))
    assert list(tmp_path.iterdir()) == []


def test_start_says_when_it_cannot_and_the_rank_runs_on(capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that was removed does not stop the recording."""
    hook.start(RankStart({"DDPILOT_RING_DIR": os.devnull}))
    assert "rank 3: training is not guarded: " in capsys.readouterr().err


class RankStart:
    """Variables that launchers set."""

    rank = 3

    def __init__(self, environ: dict[str, Any]) -> None:
        self.environ = environ
