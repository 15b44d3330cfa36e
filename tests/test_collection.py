# SPDX-License-Identifier: Apache-2.0
"""Is every test run that is there?"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def test_every_folder_with_tests_is_collected(request: pytest.FixtureRequest) -> None:
    """No folder that holds tests has a name that pytest passes over; its default list has `dist` on it."""
    passed_over = request.config.getini("norecursedirs")
    folders = {parent for file in TESTS.rglob("test_*.py") for parent in file.relative_to(TESTS).parents}
    names = {folder.name for folder in folders if folder.name}
    assert {"unit", "dist", "notebook", "gpu"} <= names
    assert [name for name in names if any(fnmatch(name, pattern) for pattern in passed_over)] == []
