# SPDX-License-Identifier: Apache-2.0
"""A terminal on the login node: commands of a page are typed into a real shell, whose prompt says which node it is."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pexpect

from tests.slurm.cluster import Cluster

PROMPTS = r"(?:login|n\d)\$|In \[\d+\]:| +\.{3}:"
_AT_PROMPT = re.compile(rf"(?:^|\n)({PROMPTS}) $")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\a")
_LIMIT_S = 60.0
TYPED = re.compile(rf"^({PROMPTS}) (.*)\n((?:(?!(?:{PROMPTS}) ).*\n)*)", re.MULTILINE)
"""In a block of a page: prompt, what is typed, and what is printed until the next prompt."""


class Terminal:
    """A shell in `folder`. `type` enters a line and returns what it prints."""

    def __init__(self, cluster: Cluster, folder: Path, programs: Sequence[Path]) -> None:
        home = folder.parent / "home"  # without the files of this machine's user
        home.mkdir(exist_ok=True)
        path = os.pathsep.join(map(str, (*programs, Path(sys.executable).parent, cluster.environ()["PATH"])))
        prompt = 'PS1="${SLURMD_NODENAME:-login}$ "'  # also of the shells that salloc and srun start
        own = {"PROMPT_COMMAND": prompt, "HOME": str(home), "TERM": "dumb", "PATH": path}
        variables = {**cluster.environ(), **own, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        words = [*cluster.on_login(), "bash", "--noediting"]
        self._shell = pexpect.spawn(
            words[0],
            words[1:],
            cwd=folder,
            env=variables,
            echo=False,
            encoding="utf-8",
            dimensions=(40, 120),
            timeout=_LIMIT_S,
        )
        self._is_on_node = False
        self.prompt, _ = self._read()

    def type(self, line: str) -> str:
        """Enter a line, wait for the next prompt, and return what was printed until then."""
        self._is_on_node = not self.prompt.startswith("login") and (self._is_on_node or self.prompt.startswith("n"))
        self._shell.sendline(line)
        self.prompt, printed = self._read()
        return printed.removeprefix(f"{line}\n") if self._is_on_node else printed  # a terminal there echoes

    def _read(self) -> tuple[str, str]:
        text = ""
        while (found := _AT_PROMPT.search(text)) is None:
            try:
                text += self._shell.read_nonblocking(65_536, timeout=_LIMIT_S)
            except (pexpect.TIMEOUT, pexpect.EOF) as error:
                raise TimeoutError(f"no prompt came after\n{text}") from error
            text = _CONTROL.sub("", text).replace("\r", "")
        return found[1], text[: found.start() + 1] if found.start() or text.startswith("\n") else ""

    def close(self) -> None:
        """Hang up."""
        self._shell.close(force=True)


@contextmanager
def open_terminal(cluster: Cluster, folder: Path, programs: Sequence[Path] = ()) -> Iterator[Terminal]:
    """A terminal whose shell starts in `folder`, with folders of `programs` in front of PATH; hung up afterwards."""
    terminal = Terminal(cluster, folder, programs)
    try:
        yield terminal
    finally:
        terminal.close()
