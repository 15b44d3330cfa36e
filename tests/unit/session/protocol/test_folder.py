# SPDX-License-Identifier: Apache-2.0
"""A session's private folder: accessible by this user only, with a path short enough for Unix sockets."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from ddpilot.session.protocol.folder import make_folder


def test_make_folder_is_private_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the temporary directory, or elsewhere where that one is too deep."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    for parent, is_used in ((Path(tempfile.gettempdir()), True), (deep, False)):
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        folder = make_folder()
        try:
            assert folder.stat().st_mode & 0o777 == 0o700
            assert len(str(folder / "r1023.99.parcels")) <= 107
            assert (folder.parent == parent) is is_used
            (folder / "socket").touch()
        finally:
            shutil.rmtree(folder)
