# SPDX-License-Identifier: Apache-2.0
"""`ddpilot run` and torchrun in processes of their own, with a hard limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.dist.launching import scripts
from tests.dist.launching.scripts import Outcome, finish

RUN = (sys.executable, "-m", "ddpilot", "run")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "DDPILOT_LAUNCH", "PET_")


def environment(**more: str) -> dict[str, str]:
    """This process's variables without those of a launcher."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return {**own, "OMP_NUM_THREADS": "1", **more}


def started(words: Sequence[object], folder: Path, **more: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """The command while it runs, in `folder`; killed at the end; its ranks go with it."""
    return scripts.started(words, folder, environment(**more))


def run(folder: Path, *words: object, **more: str) -> Outcome:
    """`ddpilot run` with `words`, to its end."""
    with started([*RUN, *words], folder, **more) as process:
        return finish(process)


def wait_for_line(process: subprocess.Popen[str], said: str) -> str:
    """Read stdout up to the line with `said`; ends with the process, and the test's own limit."""
    assert process.stdout is not None
    for line in process.stdout:
        if said in line:
            return line
    pytest.fail(f"{process.args!r} ended without saying {said!r}", pytrace=False)


def write(folder: Path, name: str, text: str) -> Path:
    """A script in `folder`."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
