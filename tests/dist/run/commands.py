# SPDX-License-Identifier: Apache-2.0
"""`ddpilot run` and torchrun in processes of their own, with a hard limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

RUN = (sys.executable, "-m", "ddpilot", "run")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LIMIT_S = 80.0
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "DDPILOT_LAUNCH", "PET_")


@dataclass(frozen=True)
class Done:
    """How a command ended. `out`, `err`: what it wrote."""

    status: int
    out: str
    err: str

    def notes(self) -> list[str]:
        """The lines that are ddpilot's own."""
        return [line for line in self.err.splitlines() if line.startswith("ddpilot: ")]


def environment(**more: str) -> dict[str, str]:
    """This process's variables without those of a launcher."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return {**own, "OMP_NUM_THREADS": "1", **more}


@contextmanager
def started(words: Sequence[object], folder: Path, **more: str) -> Iterator[subprocess.Popen[str]]:
    """The command while it runs, in `folder`; killed at the end; its ranks go with it."""
    process = subprocess.Popen(
        [str(word) for word in words],
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> Done:
    """Wait for the end; fails the test with the last lines after `limit_s` seconds."""
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"{process.args!r} did not end in {limit_s:g} s\n{out[-2000:]}\n{err[-3000:]}", pytrace=False)
    return Done(process.returncode, out, err)


def run(folder: Path, *words: object, **more: str) -> Done:
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
