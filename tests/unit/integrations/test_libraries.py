# SPDX-License-Identifier: Apache-2.0
"""What an app changes in a library is changed back."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

from ddpilot.integrations.libraries import holders, import_quietly, replace, wrap


class Library:
    """Stands for a library."""

    limit = 3

    def double(self, number: int) -> int:
        """Twice the number."""
        return 2 * number


def test_replace_lasts_until_cleanup() -> None:
    """Attribute values are restored, the last change first."""
    with ExitStack() as cleanup:
        replace(cleanup, Library, "limit", 4)
        replace(cleanup, Library, "limit", 5)
        assert Library.limit == 5
    assert Library.limit == 3


def test_wrap_hands_the_original_to_the_wrapper_until_cleanup() -> None:
    """A method's wrapper gets it with `self` and the arguments, and it keeps its name and its documentation."""
    with ExitStack() as cleanup:
        wrap(cleanup, Library, "double", lambda original, self, number: original(self, number) + 1)
        assert Library().double(4) == 9
        assert Library.double.__doc__ == "Twice the number."
    assert Library().double(4) == 8


def test_holders_finds_the_copies_that_star_imports_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the package with the same object, not different objects of that name or other packages."""
    value = object()
    for name, held in (("pack", value), ("pack.part", value), ("pack.other", 1), ("package", value)):
        module = ModuleType(name)
        vars(module)["thing"] = held
        monkeypatch.setitem(sys.modules, name, module)
    assert [module.__name__ for module in holders("pack", "thing", value)] == ["pack", "pack.part"]


@pytest.mark.parametrize("before", [None, "7"])
def test_import_quietly_imports_with_one_thread_and_skips_broken_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """Other modules are imported after one that fails."""
    (tmp_path / "brokenpart.py").write_text("raise RuntimeError('operator does not exist')")
    (tmp_path / "goodpart.py").write_text("import os\nTHREADS = os.environ['OPENBLAS_NUM_THREADS']")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "goodpart", raising=False)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if before is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", before)
    import_quietly("nosuchpart", "brokenpart", "goodpart")
    assert sys.modules["goodpart"].THREADS == "1"
    assert os.environ.get("OPENBLAS_NUM_THREADS") == before
    del sys.modules["goodpart"]
