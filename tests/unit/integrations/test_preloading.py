# SPDX-License-Identifier: Apache-2.0
"""Heavy imports before ranks are forked: what fails waits for its cell, and the environment stays as it was."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ddpilot.integrations.preloading import import_quietly


@pytest.mark.parametrize("before", [None, "7"])
def test_import_quietly_imports_with_one_thread_and_passes_over_what_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """A module that cannot be imported stops none of the others."""
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
