# SPDX-License-Identifier: Apache-2.0
"""Pictures of cells in JupyterLab, in a real Chromium: a hang and its report, an error of one rank, the board."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pictures.files import SCHEMES, write_screenshot
from tests.browser.chromium import find_chromium
from tests.browser.lab import Lab
from tests.browser.person import LIMIT_S, NotebookTab, open_notebook

START = "%load_ext ddpilot\n%ddp start -n 2 --on-finding stop"

TRAIN = """\
%%ddp
import torch
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 10).to(group.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    x, y = torch.randn(32, 64, device=group.device), torch.randint(10, (32,), device=group.device)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()"""

HANG = """\
%%ddp
correct = (model(x).argmax(1) == y).float().mean()
if rank == 0:
    torch.save(model.module.state_dict(), "/tmp/model.pt")
    torch.distributed.barrier()
torch.distributed.all_reduce(correct)"""

ERROR = """\
%%ddp
def read_batch(step):
    images = torch.randn(32, 64, device=group.device)
    if rank == 1 and step == 2:
        raise OSError("shard 7 of the images ends after 1,204 bytes")
    return images

for step in range(10):
    loss = model(read_batch(step)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()"""

BUSY = """\
%%ddp
import time
for step in range(1000):
    if rank == 0:
        time.sleep(20)
    torch.distributed.all_reduce(correct)"""

_HIDDEN = ".jp-Cell .jp-cell-toolbar, .jp-Notebook-footer, .jp-Collapser { display: none !important }"


@contextmanager
def opened(cells: list[str]) -> Iterator[NotebookTab]:
    """Open a notebook of these cells in a JupyterLab and a browser of its own."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="lab-") as folder, sync_playwright() as driver:
        lab = Lab(Path(folder))
        browser: Any = driver.chromium.launch(executable_path=find_chromium())
        try:
            page = browser.new_page(viewport={"width": 1000, "height": 1500}, device_scale_factor=1.5)
            page.set_default_timeout(1000 * LIMIT_S)
            tab = open_notebook(page, lab, lab.put("train.ipynb", cells))
            page.add_style_tag(content=_HIDDEN)
            yield tab
        finally:
            browser.close()
            lab.end_kernels()
            lab.stop()


def keep(tab: NotebookTab, name: str, index: int) -> None:
    """Keep a picture of a cell and its output in both themes."""
    for scheme in SCHEMES:
        tab.theme("Light" if scheme == "light" else "Dark")
        tab.page.mouse.move(0, 0)
        write_screenshot(name, scheme, tab.cell(index).screenshot(animations="disabled"))


def draw() -> None:
    """Draw "hang", "error" and "board"."""
    with opened([START, TRAIN, HANG, ERROR, "%ddp status --live", BUSY]) as tab:
        tab.run(0)
        tab.run(1)
        shown = tab.run(2)
        assert "DDP201" in shown, shown
        keep(tab, "hang", 2)
        shown = tab.run(3)
        assert "variables are kept" in shown, shown
        keep(tab, "error", 3)
        tab.run(4)
        tab.start(5)
        tab.see(4, "all_reduce")
        keep(tab, "board", 4)
        tab.press_stop()
        tab.wait(5)
