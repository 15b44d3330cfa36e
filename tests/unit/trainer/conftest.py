# SPDX-License-Identifier: Apache-2.0
"""What all of these tests need."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def compiler_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first optimizer of a process imports torch's compiler, which sets this variable if it is unset."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    importlib.import_module("torch._dynamo")
