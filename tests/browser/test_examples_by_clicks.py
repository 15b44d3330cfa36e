# SPDX-License-Identifier: Apache-2.0
"""Every notebook in examples/ as a person runs it: JupyterLab, one click per cell."""

from __future__ import annotations

import base64
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import OpenNotebook
from tests.browser.lab import Lab
from tests.browser.person import failed
from tests.notebook.executed import ranks_that_said, stream
from tests.notebook.stored import find_differences

pytestmark = pytest.mark.browser
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))

LABELLED = r"^\[ranks? [\d,-]+\] "
# A labelled line, and how many different ones a notebook has at least; of those that are not named here one.
LINES = {"quickstart": (rf"{LABELLED}epoch +\d+: loss \d\.\d+", 10)}
BOTH = {"0", "1"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_example_runs_by_clicks(example: Path, lab: Lab, open_tab: OpenNotebook) -> None:
    """Labelled lines and every plot are on the page, and only those cells fail that are tagged to."""
    shutil.copy(example, lab.root)
    tab = open_tab(example.name)
    shown = {index: tab.run(index, limit_s=120) for index in tab.code_cells()}
    cells = tab.saved_cells()
    tagged = [index for index in shown if "raises-exception" in cells[index].metadata.get("tags", [])]
    assert failed(cells) == tagged
    by_id = {cells[index].id: cells[index] for index in shown}
    assert find_differences(example, by_id) == {}, "run `make notebooks` and commit examples"
    {"interactive": check_interactive, "quickstart": check_quickstart}[example.stem](by_id)

    pattern, num_lines = LINES.get(example.stem, (LABELLED, 1))
    lines = {index: set(re.findall(pattern, text, re.MULTILINE)) for index, text in shown.items()}
    most = max(lines, key=lambda index: len(lines[index]))
    assert len(lines[most]) >= num_lines, shown[most]
    plots = [index for index in shown for output in cells[index].outputs if "image/png" in output.get("data", {})]
    sizes = [size for index in dict.fromkeys(plots) for size in tab.images(index)]
    assert len(sizes) == len(plots) > 0
    assert min(map(min, sizes)) > 100

    for theme in ("Light", "Dark"):
        tab.theme(theme)
        tab.photograph(f"{example.stem}-{theme.lower()}-lines", most)
        tab.photograph(f"{example.stem}-{theme.lower()}-plot", plots[0])
        tab.photograph(f"{example.stem}-{theme.lower()}")


def check_quickstart(cells: dict[str, Any]) -> None:
    """Both ranks print each epoch, accuracy is 97 % or more, and both end with the same parameters."""
    for epoch in range(1, 11):
        assert ranks_that_said(stream(cells["launch"]), f"epoch {epoch:2}: loss") == BOTH
    said = re.fullmatch(r"test accuracy: ([\d.]+)%\n", stream(cells["accuracy"]))
    assert said is not None
    assert float(said[1]) >= 97
    assert stream(cells["replicas-agree"]) == "both ranks ended with the same parameters\n"


def check_interactive(cells: dict[str, Any]) -> None:
    """Output is labelled, the error shows its rank and line, training goes on from there, to more than 95 %."""
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
