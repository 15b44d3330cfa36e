# SPDX-License-Identifier: Apache-2.0
"""The snippets of docs/how_to/lightning.md run, one after the other, in a real kernel."""

from __future__ import annotations

import re
from pathlib import Path

from tests.notebook.running import run_cells

PAGE = Path(__file__).parents[3] / "docs" / "how_to" / "lightning.md"


def test_page_on_lightning_runs(tmp_path: Path) -> None:
    """Each python snippet is a cell; Fabric's returns what the page says; the mapping makes our strategy."""
    cells = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(cells) == 4
    shown = run_cells([*cells, "print(type(trainer.strategy).__name__)"], tmp_path)
    assert re.search(r"^1\.0", shown, re.MULTILINE), shown
    assert shown.endswith("DdpilotStrategy\n")
    assert shown.count("start their ranks from ddpilot's rank server") == 1
