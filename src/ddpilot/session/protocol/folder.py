# SPDX-License-Identifier: Apache-2.0
"""Create the private folder of a session, for sockets and files of its kernels."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_MAX_FOLDER_CHARS = 60
"""Longest parent folder to use: the path of a Unix socket is limited to 107 characters."""


def make_folder() -> Path:
    """Create a folder with mode 0700 in the temporary directory, or in /tmp if the path of that one is long."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(parent)) <= _MAX_FOLDER_CHARS:
            return Path(tempfile.mkdtemp(prefix="ddpilot-", dir=parent))
    return Path(tempfile.mkdtemp(prefix="ddpilot-"))
