# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of probes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def compiler_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process's first optimizer, or tensor on `meta`, imports torch's compiler, which sets this."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    importlib.import_module("torch._dynamo")
