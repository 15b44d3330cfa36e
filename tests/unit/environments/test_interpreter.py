# SPDX-License-Identifier: Apache-2.0
"""Frames of running threads are read while no garbage collection can hand the GIL to them."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ddpilot.environments.interpreter import (
    collector_paused,
    forget,
    frames_of_threads,
    main_frame,
    reading_frames,
    when_imported,
)


def test_collector_paused_leaves_a_disabled_collector_disabled() -> None:
    """The code that disabled it enables it again."""
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


is_lazy = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="only CPython 3.11 collects while frames are read")


class Cycle:
    """Garbage with a finalizer that records its run."""

    num_finalized = 0

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        Cycle.num_finalized += 1


@pytest.fixture
def eager_gc() -> Iterator[None]:
    """Collections at nearly every allocation."""
    before = gc.get_threshold()
    gc.collect()
    Cycle.num_finalized = 0
    yield
    gc.set_threshold(*before)


@is_lazy
def test_no_collection_starts_while_frames_are_read(eager_gc: None) -> None:
    """A finalizer could release the GIL, and the thread leave the frame that is being described."""
    with reading_frames():
        Cycle()
        gc.set_threshold(1)
        kept = [[number] for number in range(100)]
        assert Cycle.num_finalized == 0
    kept += [[number] for number in range(100)]
    assert Cycle.num_finalized == 1


@is_lazy
def test_collector_stays_as_the_user_has_set_it() -> None:
    """Off where the user has turned it off; on again after an error."""
    with pytest.raises(KeyError), reading_frames():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with reading_frames():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_frames_are_those_of_all_threads() -> None:
    """Innermost first, with the names of threads."""
    go, come = threading.Event(), threading.Event()

    def wait_in_thread() -> None:
        come.set()
        go.wait()

    thread = threading.Thread(target=wait_in_thread, name="waits")
    thread.start()
    come.wait()
    try:
        found = [(name, frame.f_code.co_name) for name, frame in frames_of_threads()]
    finally:
        go.set()
        thread.join()
    assert ("waits", "wait_in_thread") in found
    assert found.index(("waits", "wait")) < found.index(("waits", "wait_in_thread"))
    frame = main_frame()
    assert frame is not None
    assert frame.f_code.co_name == "main_frame"


NAME = "imported_by_a_test"


@pytest.fixture
def module_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that can be imported, and is not yet; what looks for imports is as before afterwards."""
    path = tmp_path / f"{NAME}.py"
    path.write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield path
    sys.modules.pop(NAME, None)
    for key in ("first", "second"):
        forget(NAME, key)


def test_when_imported_acts_after_a_later_import_and_once(module_file: Path) -> None:
    """The module is complete by then; importing it again does not run the action again."""
    seen: list[int] = []
    when_imported(NAME, "first", lambda module: seen.append(module.value))
    assert seen == []
    importlib.import_module(NAME)
    del sys.modules[NAME]
    importlib.import_module(NAME)
    assert seen == [1]


def test_when_imported_acts_at_once_when_the_module_is_there(module_file: Path) -> None:
    """Which import stands first does not matter."""
    importlib.import_module(NAME)
    seen: list[ModuleType] = []
    when_imported(NAME, "first", seen.append)
    assert seen == [sys.modules[NAME]]


def test_when_imported_keeps_the_last_of_a_key_and_all_keys(module_file: Path) -> None:
    """Asking twice for one thing does it once; `forget` takes it back."""
    seen: list[str] = []
    when_imported(NAME, "first", lambda module: seen.append("replaced"))
    when_imported(NAME, "first", lambda module: seen.append("first"))
    when_imported(NAME, "second", lambda module: seen.append("second"))
    forget(NAME, "second")
    importlib.import_module(NAME)
    assert seen == ["first"]


def test_when_imported_waits_on_when_the_import_fails(module_file: Path) -> None:
    """The error is the module's own, and the next import that succeeds counts."""
    seen: list[ModuleType] = []
    when_imported(NAME, "first", seen.append)
    module_file.write_text("raise ValueError('a bad day')\n")
    with pytest.raises(ValueError, match="a bad day"):
        importlib.import_module(NAME)
    assert seen == []
    module_file.write_text("value = 1234567\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert seen == [sys.modules[NAME]]


def test_when_imported_leaves_other_imports_alone(module_file: Path) -> None:
    """A module without an action, and a module that does not exist."""
    when_imported("no_such_module", "first", lambda module: None)
    assert importlib.import_module(NAME).value == 1
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("no_such_module")
    forget("no_such_module", "first")


@pytest.mark.parametrize("source", ["import gc\nvalue = gc.isenabled()\n", "raise ValueError('in the module')\n"])
def test_an_awaited_import_pauses_the_collector_and_resumes_it(module_file: Path, source: str) -> None:
    """Also where the module cannot be imported."""
    module_file.write_text(source)
    when_imported(NAME, "first", lambda module: None)
    try:
        assert importlib.import_module(NAME).value is False
    except ValueError:
        assert source.startswith("raise")
    assert gc.isenabled()
