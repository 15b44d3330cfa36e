# SPDX-License-Identifier: Apache-2.0
"""The command `ddpilot` in the process of the tests, whose rank server is warm: starting it takes seconds elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from ddpilot.cli.app import main
from tests.dist.forked import forked_ranks


class Done(NamedTuple):
    """How the command ended."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run_command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `ddpilot` with these words to its end."""

    def run(*words: object) -> Done:
        capfd.readouterr()
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setattr(sys, "argv", ["ddpilot", *map(str, words)])
        with forked_ranks(), pytest.raises(SystemExit) as ended:
            main()
        said = capfd.readouterr()
        return Done(int(ended.value.code or 0), said.out, said.err)

    return run
