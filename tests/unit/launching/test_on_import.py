# SPDX-License-Identifier: Apache-2.0
"""Actions that wait for a module's import."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ddpilot.launching.on_import import forget, when_imported

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
