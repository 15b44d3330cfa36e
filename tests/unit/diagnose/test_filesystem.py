# SPDX-License-Identifier: Apache-2.0
"""The checkpoint folder: passes in a usual folder, fails on a full disk and where renames are refused."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddpilot.diagnose.checks import filesystem
from tests.unit.diagnose.checking import make_facts, statuses, text_of


@contextmanager
def append_only(folder: Path) -> Iterator[None]:
    """A folder in which files can be created, but neither renamed nor removed."""
    done = subprocess.run(["chattr", "+a", str(folder)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("this file system has no append-only folders")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-a", str(folder)], check=True)


def test_a_usual_folder_has_space_and_takes_writes_and_renames(tmp_path: Path) -> None:
    """Also a folder that does not exist yet; nothing is left in it."""
    facts = make_facts(checkpoint_dir=tmp_path / "not" / "yet")
    for check in (filesystem.checkpoint_space, filesystem.checkpoint_write, filesystem.atomic_rename):
        assert statuses(check, facts) == ["ok"], text_of(check, facts)
    assert os.listdir(tmp_path) == []
    assert str(tmp_path) in text_of(filesystem.checkpoint_space, facts)


def test_a_folder_that_refuses_renames_is_an_error(tmp_path: Path) -> None:
    """Files can be created in it, and keep their names for ever."""
    inner = tmp_path / "checkpoints"
    inner.mkdir()
    made = inner / "scratch"
    made.mkdir()
    with pytest.MonkeyPatch.context() as patch, append_only(made):
        patch.setattr("tempfile.mkdtemp", lambda **_: str(made))
        found = text_of(filesystem.atomic_rename, make_facts(checkpoint_dir=inner))
    assert f"renaming a file onto another one in {inner}: Operation not permitted" in found
