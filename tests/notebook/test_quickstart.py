# SPDX-License-Identifier: Apache-2.0
"""The main job, for real: the quickstart notebook in a Jupyter kernel, 2 ranks, real digits."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_core.utils import ensure_event_loop
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from examples import run_quickstart
from tests.notebook.executed import ROOT, read
from tests.notebook.stored import find_differences
from tests.soak import soak

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


@pytest.mark.timeout(300)
@soak  # tests/browser runs the notebook's cells too, and the next test the script
def test_quickstart_trains_on_two_ranks_and_writes_notebook_and_plots(tmp_path: Path) -> None:
    """What `make demo` runs: all cells pass, accuracy is 97 % or more, and every file that it names is there."""
    argv = [sys.executable, str(ROOT / "examples" / "run_quickstart.py"), "--out", str(tmp_path / "my out")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    said = [line.split(maxsplit=1) for line in done.stdout.splitlines() if not line.startswith("executing")]
    facts = [(words[0], words[-1].strip()) for words in said]
    assert float(dict(facts)["test"].split()[-1].rstrip("%")) >= 97
    plots = [Path(value) for key, value in facts if key == "plot"]
    assert [plot.name for plot in plots] == ["loss-curve.png", "predictions.png"]
    assert all(plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 5000 for plot in plots)
    executed = {cell.id: cell for cell in read(tmp_path / "my out" / "quickstart.ipynb").cells}
    assert find_differences(NOTEBOOK, executed) == {}, "run `make notebooks` and commit examples"
    assert "Traceback" not in done.stderr
    assert "WARNING" not in done.stderr


def write_notebook(folder: Path, monkeypatch: pytest.MonkeyPatch, **sources: str) -> None:
    """Let the demo run a notebook of these cells, sources by id, in place of the quickstart."""
    cells = [
        new_code_cell(source, id=name.replace("_", "-"))  # type: ignore[no-untyped-call]
        for name, source in sources.items()
    ]
    nbformat.write(new_notebook(cells=cells), folder / "quickstart.ipynb")  # type: ignore[no-untyped-call]
    monkeypatch.setattr(run_quickstart, "NOTEBOOK", folder / "quickstart.ipynb")


@pytest.fixture
def _own_loop() -> Iterator[None]:
    """nbclient makes an event loop, and leaves it open."""
    yield
    ensure_event_loop().close()
    asyncio.set_event_loop(None)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("_own_loop")
def test_run_quickstart_writes_notebook_and_plots_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file per plot, named as its cell is; exit status 0."""
    picture = (ROOT / "docs" / "pictures" / "board-dark.png").read_bytes()[:200]
    shows = f"from IPython.display import Image, display\ndisplay(Image(data={picture!r}, format='png'))"
    write_notebook(tmp_path, monkeypatch, accuracy="print('test accuracy: 98.50%')", loss_curve=shows)
    out = tmp_path / "my out"
    assert run_quickstart.main(["--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in said[1:]] == [
        ["test", "accuracy      98.50%"],
        ["executed", f"notebook  {out / 'quickstart.ipynb'}"],
        ["plot", str(out / "loss-curve.png")],
    ]
    assert (out / "loss-curve.png").read_bytes() == picture
    assert [cell.execution_count for cell in read(out / "quickstart.ipynb").cells] == [1, 2]


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("_own_loop")
def test_run_quickstart_keeps_the_notebook_and_fails_when_a_cell_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing cell ends the demo with its error, and so with exit status 1; the notebook up to there is written."""
    write_notebook(tmp_path, monkeypatch, a="print('first')", b="import sklearn_that_nobody_has", c="print('last')")
    with pytest.raises(CellExecutionError, match="No module named 'sklearn_that_nobody_has'"):
        run_quickstart.main(["--out", str(tmp_path / "out")])
    first, second, third = read(tmp_path / "out" / "quickstart.ipynb").cells
    assert first.outputs[0].text == "first\n"
    assert second.outputs[0].ename == "ModuleNotFoundError"
    assert third.outputs == []


def test_quickstart_uses_torch_in_the_kernel_before_it_launches() -> None:
    """The case that breaks launchers that fork the kernel: a matmul and a backward in an earlier cell."""
    sources = [cell.source for cell in read(NOTEBOOK).cells if cell.cell_type == "code"]
    first_use = next(i for i, source in enumerate(sources) if " @ " in source and ".backward()" in source)
    launch = next(i for i, source in enumerate(sources) if "ddpilot.launch(" in source)
    assert first_use < launch


def test_interactive_is_short() -> None:
    """Under 20 cells, and one cell that is allowed to fail."""
    notebook = read(NOTEBOOK.with_name("interactive.ipynb"))
    assert len(notebook.cells) < 20
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.id for cell in cells if cell.metadata.get("tags")] == ["mistake"]
