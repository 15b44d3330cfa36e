# SPDX-License-Identifier: Apache-2.0
"""Run an example notebook in a real kernel, in a process of its own; read what its cells show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from examples.run_quickstart import OwnKernel

ROOT = Path(__file__).parents[2]
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def read(path: Path) -> Any:
    """The notebook in that file."""
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def execute(notebook: Path, folder: Path, limit_s: float) -> dict[str, Any]:
    """Execute `notebook` with `folder` as its working directory; its code cells by their ids."""
    out = folder / notebook.name
    argv = [sys.executable, "-m", "tests.notebook.executed", str(notebook), str(out)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return {cell.id: cell for cell in read(out).cells if cell.cell_type == "code"}


def stream(cell: Any, name: str = "stdout") -> str:
    """All of a stream that the cell shows, without colours."""
    return _ANSI.sub("", "".join(output.text for output in cell.outputs if output.get("name") == name))


def ranks_that_said(printed: str, text: str) -> set[str]:
    """Numbers of the ranks in the labels of all lines with `text`; ranks that say the same at once share a line."""
    labels = [line.partition("]")[0] for line in printed.splitlines() if text in line]
    return {rank for label in labels for rank in re.findall(r"\d+", label)}


def main(notebook: Path, out: Path) -> None:
    """Execute `notebook` in the folder of `out`, and write it there."""
    nb = read(notebook)
    resources = {"metadata": {"path": str(out.parent)}}
    client = NotebookClient(nb, kernel_manager_class=OwnKernel, timeout=120, coalesce_streams=True, resources=resources)
    client.execute()
    nbformat.write(nb, out)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
