# SPDX-License-Identifier: Apache-2.0
"""Run commands and scripts, as processes of their own, with a hard time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from tests.dist.forked import start_forked

LIMIT_S = 80.0
_LAUNCHERS = ("-m ddpilot run ", "-m torch.distributed.run ")


@dataclass(frozen=True)
class Outcome:
    """How a command ended. `out`, `err`: what it wrote."""

    code: int
    out: str
    err: str

    def notes(self) -> list[str]:
        """The lines that are ddpilot's own."""
        return [line for line in self.err.splitlines() if line.startswith("ddpilot: ")]


@contextlib.contextmanager
def started(
    words: Sequence[object],
    folder: Path,
    env: Mapping[str, str],
    stdin: IO[str] | int | None = None,
    *,
    is_fresh: bool = False,
    forks_ranks: bool = True,
) -> Iterator[subprocess.Popen[str]]:
    """The command while it runs, in `folder`; killed at the end, with its group. Its input is this process's.

    A launcher of scripts is forked from this process, unless `is_fresh`; so are its ranks with `forks_ranks`, which
    leaves out what Python does at the end of a process, after the exit handlers.
    """
    command = [str(word) for word in words]
    streams: dict[str, Any] = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    streams |= {"cwd": folder, "start_new_session": True}
    if not is_fresh and " ".join(command[1:]).startswith(_LAUNCHERS) and command[0] == sys.executable:
        process = start_forked(command, env, forks_ranks=forks_ranks, **streams)
    else:
        process = subprocess.Popen(command, env=env, text=True, **streams)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the session that this function started
        process.communicate()


@contextlib.contextmanager
def running(
    source: str,
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    through_stdin: bool = False,
    prefix: tuple[str, ...] = (),
    module: tuple[str, ...] = (),
    forks_ranks: bool = True,
) -> Iterator[subprocess.Popen[str]]:
    """Start `source` in `folder` as script.py, or through stdin as a prompt would; end it, and its group, afterwards.

    `prefix`: a command to run it by; `module`: such as ("-m", "torch.distributed.run"); `forks_ranks`: see `started`.
    """
    script = folder / "script.py"
    script.write_text(source)
    command = [*prefix, sys.executable, *module, "-" if through_stdin else script]
    with script.open() as text, contextlib.ExitStack() as stack:
        stdin = text if through_stdin else subprocess.DEVNULL
        variables = {**os.environ, **(env or {})}
        yield stack.enter_context(started(command, folder, variables, stdin, forks_ranks=forks_ranks))


def finish(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> Outcome:
    """Wait for the end; fail the test, with what was written, after `limit_s` seconds."""
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"{process.args!r} did not end in {limit_s:g} s\n{out[-3000:]}\n{err[-3000:]}", pytrace=False)
    return Outcome(process.returncode, out, err)


def run_script(
    source: str, folder: Path, *, limit_s: float = LIMIT_S, may_fail: bool = False, **how: object
) -> Outcome:
    """Run `source` to its end; `how` as for `running`. Fails the test on a nonzero exit code unless `may_fail`."""
    with running(source, folder, **how) as process:  # type: ignore[arg-type]
        outcome = finish(process, limit_s=limit_s)
    if outcome.code != 0 and not may_fail:
        pytest.fail(f"exit code {outcome.code}\n--- stdout\n{outcome.out[-3000:]}\n--- stderr\n{outcome.err[-4000:]}")
    return outcome


def wait_until(is_so: Callable[[], bool], *, limit_s: float = 30.0) -> None:
    """Look every 10 ms until `is_so`; fail the test after `limit_s`."""
    end = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > end:
            pytest.fail(f"{is_so} was not so within {limit_s} s")
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process of that number runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state not in "ZX"
