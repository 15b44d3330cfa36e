# SPDX-License-Identifier: Apache-2.0
"""`ddpilot doctor` on scripts for two devices, one after the other in one process, whose rank server is then warm."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

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
    few = mock.patch("ddpilot.diagnose.doctor._examine", examine_with_small_messages)
    with printed.open("w") as file, contextlib.redirect_stdout(file), few, contextlib.suppress(SystemExit):
        main()
    return printed.read_text()


def examine_with_small_messages() -> Any:
    """Examine a rank as the doctor does. 256 MB, which show a GPU's link, take the emulated one 4 s of each rank."""
    from ddpilot.diagnose import ranks

    ranks._DEVICE_SIZES = ranks._CPU_SIZES
    return ranks.examine_rank(10.0)
