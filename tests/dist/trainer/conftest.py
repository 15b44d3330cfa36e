# SPDX-License-Identifier: Apache-2.0
"""What every test of the trainer needs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def compiler_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first optimizer of a process imports torch's compiler, which sets this variable if it is unset."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")
