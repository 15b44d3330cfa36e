# SPDX-License-Identifier: Apache-2.0
"""The interactive notebook in a Jupyter kernel: 2 ranks, real digits, a mistake on the way."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from tests.notebook.executed import ROOT, execute, ranks_that_said, read, stream
from tests.notebook.stored import find_differences

NOTEBOOK = ROOT / "examples" / "interactive.ipynb"
BOTH = {"0", "1"}


@pytest.mark.timeout(170)
def test_interactive_trains_through_a_mistake_on_two_ranks(tmp_path: Path) -> None:
    """Output is labelled, the error shows its rank and line, training goes on from there, to more than 95 %."""
    cells = execute(NOTEBOOK, tmp_path, limit_s=160)
    assert re.search(r"2 ranks ready in [\d.]+ s", stream(cells["start"]))
    for rank in BOTH:
        assert ranks_that_said(stream(cells["meet"]), f"I am rank {rank}") == {rank}
    assert ranks_that_said(stream(cells["meet"]), "the sum over 2 ranks is 3") == BOTH
    for epoch in range(1, 4):
        assert ranks_that_said(stream(cells["train"]), f"epoch {epoch}: loss") == BOTH

    shown = stream(cells["mistake"], "stderr")
    assert shown.startswith("RankError: rank 1 raised IndexError: Target 10 is out of bounds.")
    assert re.search(r"Cell In\[\d+\], line 5\b", shown)
    assert "----> 5 loss = F.cross_entropy(model(images.to(device)), labels.to(device))" in shown
    assert re.search(r"freed and rebuilt in [\d.]+ s, variables are kept; 1 DDP model bound to it", shown)
    assert [output.ename for output in cells["mistake"].outputs if output.output_type == "error"] == ["RankError"]
    board = cells["status"].outputs[0].data
    assert board["text/plain"].startswith("2 ranks: 2 idle")
    assert "text/html" in board

    went_on = stream(cells["go-on"])
    assert ranks_that_said(went_on, "losses so far: [") == BOTH
    for epoch in range(4, 10):
        assert ranks_that_said(went_on, f"epoch {epoch}: loss") == BOTH
    said = re.fullmatch(r"\[rank 0\] test accuracy: ([\d.]+)%\n", stream(cells["accuracy"]))
    assert said is not None
    assert float(said[1]) > 95
    label, figure = cells["figure"].outputs
    assert label.data["text/plain"] == "[rank 0]"
    png = base64.b64decode(figure.data["image/png"])
    assert png.startswith(b"\x89PNG")
    assert len(png) > 5000
    pulled = stream(cells["pull"])
    assert "`losses` is now list of 9 from rank 0" in pulled
    assert "both ranks ended with the same parameters" in pulled
    assert "stopped 2 ranks" in stream(cells["stop"])
    assert find_differences(NOTEBOOK, cells) == {}, "run `make notebooks` and commit examples"


def test_interactive_is_short() -> None:
    """Under 20 cells, and one cell that is allowed to fail."""
    notebook = read(NOTEBOOK)
    assert len(notebook.cells) < 20
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.id for cell in cells if cell.metadata.get("tags")] == ["mistake"]
