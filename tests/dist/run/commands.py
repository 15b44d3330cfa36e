# SPDX-License-Identifier: Apache-2.0
"""`ddpilot run` and torchrun, with a hard limit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import IO

import pytest

from ddpilot.cli.app import main
from tests.dist.forked import forked_ranks, is_as_here
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
    """The command while it runs, in `folder`; killed at the end; its ranks go with it. A launcher is forked."""
    return scripts.started(words, folder, environment(**more))


def run_fresh(folder: Path, *words: object, **more: str) -> Outcome:
    """`ddpilot run` with `words` in a process of its own, to its end."""
    with scripts.started([*RUN, *words], folder, environment(**more), is_fresh=True) as process:
        return finish(process)


def run(folder: Path, *words: object, **more: str) -> Outcome:
    """`ddpilot run` with `words`, to its end: the ranks are processes, and this one, which has torch, their parent.

    A parent of its own takes 1.5 s to import torch; `started` forks one, and `run_fresh` is for what
    differs in a process that has forked nothing. Ranks are forked as well, where Python and torch would read the same
    variables as here.
    """
    variables = environment(**more)
    with forked_ranks() if is_as_here(variables) else nullcontext():
        return run_with_fresh_ranks(folder, *words, **more)


def run_with_fresh_ranks(folder: Path, *words: object, **more: str) -> Outcome:
    """As `run`, where it matters how Python starts the ranks."""
    variables = environment(**more)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
        patch.chdir(folder)
        for name in set(os.environ) - set(variables):
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["ddpilot", "run", *map(str, words)])
        with _written_to(1, out, "stdout"), _written_to(2, err, "stderr"), pytest.raises(SystemExit) as ended:
            main()
        return Outcome(int(ended.value.code or 0), _read(out), _read(err))


@contextmanager
def _written_to(fd: int, file: IO[str], name: str) -> Iterator[None]:
    """What this process, and those that it starts, write to a stream goes to `file`."""
    kept = os.dup(fd)
    try:
        os.dup2(file.fileno(), fd)
        with open(fd, "w", closefd=False) as stream, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, name, stream)
            yield
    finally:
        os.dup2(kept, fd)
        os.close(kept)


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


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
