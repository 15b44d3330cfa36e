# SPDX-License-Identifier: Apache-2.0
"""Pictures of terminals: what a real command printed, as SVG by rich."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from pictures.files import SCHEMES, Scheme, write_svg

SCRIPT = "import ddpilot\n\nwith ddpilot.init_group() as group:\n    group.barrier()\n"
SHOWN = "ddpilot run train.py -n 2 --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --rdzv-timeout 15"
_WIDTH = 112


def run(words: list[str], folder: str) -> str:
    """Return what a command prints, which is expected to fail."""
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0, done.stdout
    return done.stdout


def render(command: str, printed: str, scheme: Scheme) -> str:
    """Return a terminal with a command and what it printed as SVG."""
    from rich.console import Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI
    from rich.text import Text

    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text(printed.rstrip()))
    theme = DEFAULT_TERMINAL_THEME if scheme == "light" else MONOKAI
    return console.export_svg(title="node 0", theme=theme, unique_id=f"terminal-{scheme}")


def draw() -> None:
    """Draw "missing_node": a node that does not come."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        printed = run(SHOWN.split(), folder).replace(f"{folder}/", "")
    for scheme in SCHEMES:
        write_svg("missing_node", scheme, render(SHOWN, printed, scheme))
