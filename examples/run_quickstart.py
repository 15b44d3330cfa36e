# SPDX-License-Identifier: Apache-2.0
"""Execute quickstart.ipynb in a real Jupyter kernel and put the executed notebook and its plots into a folder."""

from __future__ import annotations

import argparse
import base64
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from ipykernel.kernelspec import RESOURCES, get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).with_name("quickstart.ipynb")
IS_POSIX = os.name == "posix"


class OwnKernel(AsyncKernelManager):
    """Starts the interpreter that runs this script, whatever kernels the user has installed, and opens no port."""

    def __init__(self, **options: Any) -> None:
        folder = Path(tempfile.mkdtemp(prefix="ddpilot-demo-", dir="/tmp" if IS_POSIX else None))
        transport = "ipc" if IS_POSIX else "tcp"  # a Unix socket, whose path has to be short
        super().__init__(transport=transport, connection_file=str(folder / "kernel.json"), **options)

    @property
    def kernel_spec(self) -> KernelSpec:
        """The specification of this interpreter's kernel."""
        return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())

    def cleanup_connection_file(self) -> None:
        """Remove the folder too."""
        super().cleanup_connection_file()
        shutil.rmtree(Path(self.connection_file).parent, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Executed:
    """What came out: the test accuracy from 0 to 1, the executed notebook, and one PNG per plot."""

    accuracy: float
    notebook: Path
    plots: tuple[Path, ...]


def execute(out: Path, *, timeout_s: float = 300.0) -> Executed:
    """Run every cell, at most `timeout_s` seconds each, and write into the folder `out`.

    The notebook is written also when a cell fails; then nbclient's CellExecutionError follows.
    """
    out.mkdir(parents=True, exist_ok=True)
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook,
        kernel_manager_class=OwnKernel,
        timeout=int(timeout_s),
        coalesce_streams=True,
        resources={"metadata": {"path": str(out)}},
    )
    target = out / NOTEBOOK.name
    try:
        client.execute()
    finally:
        nbformat.write(notebook, target)  # type: ignore[no-untyped-call]
    return Executed(accuracy=_accuracy(notebook), notebook=target, plots=tuple(_write_plots(notebook, out)))


def _accuracy(notebook: Any) -> float:
    (cell,) = [cell for cell in notebook.cells if cell.id == "accuracy"]
    said = re.search(r"test accuracy: ([\d.]+)%", "".join(output.get("text", "") for output in cell.outputs))
    assert said, f"the cell `accuracy` did not say its result; its outputs are {cell.outputs}"
    return float(said.group(1)) / 100


def _write_plots(notebook: Any, out: Path) -> list[Path]:
    plots = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                plots.append(out / f"{cell.id}.png")
                plots[-1].write_bytes(base64.b64decode(output["data"]["image/png"]))
    return plots


def main(argv: Sequence[str] | None = None) -> int:
    """Execute the notebook and say where the results are (`argv`, default `sys.argv[1:]`); return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=NOTEBOOK.parents[1] / "out" / "quickstart")
    options = parser.parse_args(argv)
    print(
        "executing examples/quickstart.ipynb in a Jupyter kernel: a CNN, 2 ranks, 1,797 handwritten digits", flush=True
    )
    executed = execute(options.out)
    print(f"test accuracy      {executed.accuracy:.2%}")
    print(f"executed notebook  {executed.notebook}")
    for plot in executed.plots:
        print(f"plot               {plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
