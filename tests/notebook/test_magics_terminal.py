# SPDX-License-Identifier: Apache-2.0
"""The magics in IPython in a terminal, where there is no notebook to show anything."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pexpect: Any = importlib.import_module("pexpect")  # IPython needs it; it publishes no types

PROMPT = r"In \[\d+\]: "
MORE = r"\.\.\.: "


class Terminal:
    """IPython on a pseudo terminal."""

    def __init__(self, folder: Path) -> None:
        argv = ["-m", "IPython", "--simple-prompt", "--no-banner", "--HistoryManager.enabled=False"]
        environment = {**os.environ, "NO_COLOR": "1", "IPYTHONDIR": str(folder)}
        self.child = pexpect.spawn(sys.executable, argv, timeout=60, encoding="utf-8", env=environment, echo=False)
        self.child.expect(PROMPT)

    def type(self, *lines: str, then: str = PROMPT) -> str:
        """What is shown up to the next prompt, or to `then`."""
        for line in lines[:-1]:
            self.child.sendline(line)
            self.child.expect(MORE)
        self.child.sendline(lines[-1])
        self.child.expect(then)
        return str(self.child.before).replace("\r\n", "\n")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """IPython with a profile of its own."""
    terminal = Terminal(tmp_path)
    try:
        yield terminal
    finally:
        terminal.child.close(force=True)


@pytest.mark.timeout(120)
def test_magics_work_in_a_terminal(terminal: Terminal) -> None:
    """Cells, auto with blocks, objects as text, an error, a question, Ctrl-C."""
    assert terminal.type("%load_ext ddpilot").strip() == ""
    assert terminal.type("%ddp start -n 2").startswith("ddpilot: 2 ranks ready in")
    assert "[rank 1] 5" in terminal.type("%%ddp", "rank + 4", "", "")
    terminal.type("%ddp auto on")
    assert "[rank 1] 1" in terminal.type("rank")
    looped = terminal.type("for i in range(2):", "    print('in block', i, rank)", "")
    assert sorted(line for line in looped.splitlines() if line) == [
        *("[rank 0] in block 0 0", "[rank 0] in block 1 0", "[rank 1] in block 0 1", "[rank 1] in block 1 1"),
    ]
    assert "<IPython.core.display.HTML object>" in terminal.type("from IPython.display import HTML; HTML('<b>x</b>')")
    failed = terminal.type("1 / 0")
    assert failed.count("ZeroDivisionError: division by zero") == 3, failed  # the sentence, the traceback, at its end
    assert "\x1b[" not in failed
    assert "Did you mean `start`?" in terminal.type("%ddp strat")
    asked = terminal.type("%%ddp --ranks 1", "input('Who? ')", "", "", then=r"\[rank 1\] Who\? ")
    assert "Who" not in asked
    assert terminal.type("Ada").strip() == "[rank 1] 'Ada'"
    terminal.child.sendline("print('go'); import time; time.sleep(60)")
    terminal.child.expect("go")
    terminal.child.sendintr()
    terminal.child.expect(r"KeyboardInterrupt: Cell In\[\d+\] was interrupted: rank 0 raised KeyboardInterrupt")
    terminal.child.expect(PROMPT)
    assert "[rank 1] 1" in terminal.type("rank")
    assert re.search(r"2 ranks: 2 idle\nrank .*\n +0 .* idle\n +1 .* idle\n", terminal.type("%ddp status"))
    terminal.child.sendline("%ddp status --live")
    for _ in range(2):  # drawn, and drawn again in its place
        terminal.child.expect("2 ranks: 2 idle")
    terminal.child.sendintr()
    terminal.child.expect(PROMPT)
    left = terminal.type("exit", then=pexpect.EOF)  # it is IPython's, also while auto is on
    assert "ddpilot" not in left  # nothing is said of ranks that end with it
