# SPDX-License-Identifier: Apache-2.0
"""Every notebook in examples/ as a person runs it: JupyterLab, one click per cell."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.browser.conftest import OpenNotebook
from tests.browser.lab import Lab
from tests.browser.person import failed

pytestmark = pytest.mark.browser
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))

LABELLED = r"^\[ranks? [\d,-]+\] "
# A labelled line, and how many different ones a notebook has at least; of those that are not named here one.
LINES = {"quickstart": (rf"{LABELLED}epoch +\d+: loss \d\.\d+", 10)}


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
