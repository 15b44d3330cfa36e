# SPDX-License-Identifier: Apache-2.0
"""One notebook that does with a Trainer what libraries do, on the rank server; then the snippets of the page on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebook.lightning.beside import render_beside, run_notebook
from tests.soak import soak

PAGE = Path(__file__).parents[3] / "docs" / "how_to" / "lightning.md"
ON_PAGE = """
print(type(trainer.strategy).__name__, "Fabric returned", returned)
"""
PRINTS = {
    "one": ["one device: world sizes [1] workers 1"],
    "two": [
        "two devices: world sizes [2] workers 1",
        "precision as on one device: True",
        "weights are new: True",
    ],
    "metrics": ["accuracy: 0", "progress: 2 epochs 32 steps finished", "best checkpoint exists: True"],
    "callbacks": [
        "steps: 32 average in the model: True",
        "epochs written: ['0', '1']",
        "metric files: 1 where the logger says: True",
    ],
    "options": ["options accepted: [2]"],
    "predict": ["predictions: 517 in the dataset's order: True"],
    "test": ["test: 0"],
    "onnx": ["ONNX computes the same: True"],
    "torchscript": ["TorchScript computes the same: True"],
    "again": [
        "again: 3 epochs 48 steps 48 seen by callback",
        "again with a new trainer: [2, 2, 2]",
        "metric files: 1",
    ],
    "error": ["RankError of rank 1 cause ValueError('a bad sample')"],
    "fabric": ["Fabric: world size 2 weights (10, 64)"],
}


@soak
@pytest.mark.timeout(400)
def test_every_cell_of_a_trainers_notebook_works_after_torch_was_used(tmp_path: Path) -> None:
    """Fit on one and on two devices, predict, test, both exports, fit again, an error, Fabric: in one kernel.

    Then the page's snippets: Fabric's returns what the page says; the mapping makes our strategy.
    `python -m tests.notebook.lightning.beside` runs Lightning's own "ddp_notebook" beside it.
    """
    snippets = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippets) == 4
    launch = re.sub(r"^(?=lightning\.Fabric)", "returned = ", snippets[2], flags=re.MULTILINE)
    ours = run_notebook("ddpilot", tmp_path, limit_s=100, more=[*snippets[:2], launch, snippets[3] + ON_PAGE])
    text = render_beside({"ddpilot": ours})
    assert not [name for name, cell in ours.items() if cell.failed], text
    for name, starts in PRINTS.items():
        lines = ours[name].printed.strip().splitlines()
        assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts, text
    *_, (said, page) = ours.items()
    assert page.printed.endswith("DdpilotStrategy Fabric returned 1.0\n"), said
