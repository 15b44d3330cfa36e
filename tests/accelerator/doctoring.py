# SPDX-License-Identifier: Apache-2.0
"""`ddpilot doctor` on scripts for two devices, one after the other in one process, whose rank server is then warm."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ddpilot.cli.app import main


def check_all(folder: str, scripts: Mapping[str, str]) -> dict[str, str]:
    """What the doctor printed, as JSON, about each of the scripts, by name."""
    return {name: _check(Path(folder, name), text) for name, text in scripts.items()}


def _check(folder: Path, text: str) -> str:
    folder.mkdir()
    (folder / "train.py").write_text(text)
    os.chdir(folder)
    sys.argv[:] = ["ddpilot", "doctor", "train.py", "-n", "2", "--updates", "2", "--workers", "0", "--json"]
    printed = folder / "printed"
    with printed.open("w") as file, contextlib.redirect_stdout(file), contextlib.suppress(SystemExit):
        main()
    return printed.read_text()
