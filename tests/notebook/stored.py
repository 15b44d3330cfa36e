# SPDX-License-Identifier: Apache-2.0
"""Store the example notebooks with the outputs of a real kernel (`make notebooks`), and compare outputs with those.

Times, losses, and which rank prints first differ from run to run: they are not compared.
"""

from __future__ import annotations

import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat

from tests.notebook.executed import ROOT, execute, read

EXAMPLES = ROOT / "examples"
NOTEBOOKS = (EXAMPLES / "quickstart.ipynb", EXAMPLES / "interactive.ipynb", EXAMPLES / "library" / "train.ipynb")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_RANKS = re.compile(r"^\[ranks? ([\d,-]+)\] (.*)$")
_NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]?\d+)?")
LATE_RANKS = re.compile(
    r"^ddpilot: (\d+ of \d+ ranks have joined the group|ranks? [\d,-]+ ha(s|ve) waited ).*\n?", re.MULTILINE
)
"""What is said of ranks for which others wait, which on a busy machine are long in their imports or not run."""
_FOLDER = re.compile(r"/(?:[\w.+-]+/)+(?=(?:site-packages|src)/)")


def normalise(output: Any) -> tuple[str, ...]:
    """What of an output is the same in each run: its kind, and its lines without numbers, sorted.

    Of an error, only the lines that name it: how ranks were freed differs from run to run.
    """
    if output.output_type in ("display_data", "execute_result"):
        return (output.output_type, *sorted(output.data))
    text = _of_no_machine(f"{output.ename}: {output.evalue}" if output.output_type == "error" else output.text)
    text = LATE_RANKS.sub("", _ANSI.sub("", text))
    lines = {_NUMBER.sub("#", _RANKS.sub(r"[rank] \2", line)) for line in text.splitlines()}
    if output.output_type == "error" or output.get("name") == "stderr":
        lines = {line for line in lines if re.match(r"\w+Error: ", line)}
    kept = (line.rstrip() for line in lines if line.strip())
    return (output.get("name", output.output_type), *sorted(kept))


def find_differences(notebook: Path, executed: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The cells whose stored outputs are not like those `executed`: by id, what is stored and what came."""
    differ = {}
    cells = read(notebook).cells
    if not any(cell.get("outputs") for cell in cells):
        return {}  # `make notebooks` has not stored it yet
    for cell in cells:
        if cell.cell_type == "code":
            stored, came = (sorted(map(normalise, outputs)) for outputs in (cell.outputs, executed[cell.id].outputs))
            if stored != came:
                differ[cell.id] = (stored, came)
    return differ


def store(notebook: Path) -> None:
    """Execute `notebook` and write its outputs into it, without folders of this machine."""
    stored = read(notebook)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if (notebook.parent / "tinydigits").exists():
            shutil.copytree(notebook.parent / "tinydigits", folder / "tinydigits")
        executed = execute(notebook, folder, limit_s=300)
    count = 0
    for cell in stored.cells:
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            cell.outputs = [_without_folders(output) for output in executed[cell.id].outputs]
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = count
    nbformat.write(stored, notebook)  # type: ignore[no-untyped-call]


def _without_folders(output: Any) -> Any:
    output.metadata = {} if "metadata" in output else None
    if output.metadata is None:
        del output["metadata"]
    if "text" in output:
        output.text = _of_no_machine(output.text)
    if output.output_type == "error":
        output.evalue = _of_no_machine(output.evalue)
        output.traceback = [_of_no_machine(line) for line in output.traceback]
    if "data" in output:
        output.data = {kind: _of_no_machine(text) for kind, text in output.data.items() if isinstance(text, str)}
    return output


def _of_no_machine(text: str) -> str:
    """Return `text` without the folders and the name of the machine that it is from."""
    return re.sub(rf"\b{re.escape(platform.node())}\b", "myhost", _FOLDER.sub(".../", text))


def main() -> None:
    """Store each notebook."""
    for notebook in NOTEBOOKS:
        store(notebook)
        sys.stdout.write(f"{notebook.relative_to(ROOT)}: {notebook.stat().st_size // 1000} kB\n")


if __name__ == "__main__":
    main()
