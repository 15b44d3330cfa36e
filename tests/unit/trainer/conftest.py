# SPDX-License-Identifier: Apache-2.0
"""What all of these tests need."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def compiler_is_loaded_in_all(compiler_is_loaded: None) -> None:
    """Trainers make optimizers."""
