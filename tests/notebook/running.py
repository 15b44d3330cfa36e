# SPDX-License-Identifier: Apache-2.0
"""Run cells as a notebook, from top to bottom, in a real kernel."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from jupyter_core.utils import ensure_event_loop
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from examples.run_quickstart import OwnKernel

_SHIMS = Path(__file__).with_name("shims")


def code_cells(notebook: Path) -> list[str]:
    """The sources of a notebook's code cells."""
    cells = nbformat.read(notebook, as_version=4).cells  # type: ignore[no-untyped-call]
    return [str(cell.source) for cell in cells if cell.cell_type == "code"]


def run_cells(cells: Sequence[str], folder: Path, *, limit_s: int = 120, env: Mapping[str, str] | None = None) -> str:
    """Run `cells` in `folder`, each at most `limit_s` seconds; what they printed. nbclient's error where one fails."""
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells])  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook,
        kernel_manager_class=OwnKernel,
        timeout=limit_s,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    try:
        client.execute(env=_environment(env or {}))
    finally:
        ensure_event_loop().close()  # nbclient made it, and leaves it open
        asyncio.set_event_loop(None)
    return "".join(_texts(notebook))


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """One thread each: a test gets as many cores as it has processes, at the best."""
    path = os.pathsep.join(part for part in (str(_SHIMS), os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", **more}


def _texts(notebook: Any) -> Iterator[str]:
    for cell in notebook.cells:
        for output in cell.outputs:
            yield output.get("text", "") or output.get("data", {}).get("text/plain", "")
