# SPDX-License-Identifier: Apache-2.0
"""Reports of profiles in a real browser: nothing is requested, nothing overflows, light and dark, wide and narrow."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from ddpilot.profiler.result import read_profile
from tests.browser.conftest import OpenNotebook
from tests.browser.lab import Lab
from tests.browser.person import failed, photograph
from tests.unit.profiler.recordings import make_scaling, write_recording

pytestmark = pytest.mark.browser

Scheme = Literal["light", "dark"]
OpenPage = Callable[[Path, int, Scheme], tuple[Any, list[str]]]

# Elements whose box leaves the window, but for those that scroll by themselves.
OVERFLOWING = """() => [...document.body.querySelectorAll("*")].filter(element => {
    const box = element.getBoundingClientRect();
    return !element.closest(".wide") && box.width && (box.right > innerWidth + 1 || box.left < -1);
}).map(element => `${element.tagName}.${element.className}: ${element.textContent.slice(0, 40)}`)"""

# Texts of one axis that touch each other.
TOUCHING = """() => [...document.querySelectorAll(".axis, .y")].flatMap(axis => {
    const boxes = [...axis.children].map(child => [child.getBoundingClientRect(), child.textContent]);
    return boxes.flatMap(([a, x], at) => boxes.slice(at + 1).filter(([b]) =>
        a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom).map(([, y]) => `${x} on ${y}`));
})"""

# Labels in bars of which a part is hidden: those that have no room at all wrap to a second line below the bar.
CUT = """() => [...document.querySelectorAll(".bar > span, .track > span")].filter(element => {
    const range = document.createRange();
    range.selectNodeContents(element);
    const text = [...range.getClientRects()].filter(box => box.width > 1);
    const outer = element.getBoundingClientRect();
    return text.some(box => box.top < outer.bottom - 2 && (box.left < outer.left - 1 || box.right > outer.right + 1));
}).map(element => element.textContent)"""


@pytest.fixture
def open_page(playwright: Any, chromium: str) -> Iterator[OpenPage]:
    """Opens a file in a window of a width and color scheme; returns the page, and the addresses that it requests."""
    browser = playwright.chromium.launch(executable_path=chromium)

    def open_(path: Path, width: int, scheme: Scheme) -> tuple[Any, list[str]]:
        requested: list[str] = []
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("request", lambda request: requested.append(request.url))
        page.goto(path.as_uri(), wait_until="networkidle")
        return page, requested

    try:
        yield open_
    finally:
        browser.close()


def photograph_whole(page: Any, name: str) -> None:
    """A picture of the whole page."""
    height = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": page.viewport_size["width"], "height": height})
    photograph(page, name)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports by name: profiles of 1, 2 and 8 ranks, and of 64, and one of scaling."""
    folder = tmp_path_factory.mktemp("reports")
    found = {}
    for num_ranks in (1, 2, 8, 64):
        recording = folder / f"{num_ranks}"
        recording.mkdir()
        write_recording(recording, num_ranks, 204, has_device=num_ranks == 2)
        found[f"{num_ranks}-ranks"] = folder / f"{num_ranks}.html"
        read_profile(recording).to_html(found[f"{num_ranks}-ranks"], title=f"train.py on {num_ranks} ranks")
    found["scaling"] = folder / "scaling.html"
    make_scaling().to_html(found["scaling"])
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("width", [1200, 360])
@pytest.mark.parametrize("name", ["1-ranks", "2-ranks", "8-ranks", "64-ranks", "scaling"])
def test_a_report_is_readable(reports: dict[str, Path], open_page: OpenPage, name: str, width: int) -> None:
    """It requests itself alone; nothing leaves the window, labels neither touch nor are cut."""
    backgrounds = {}
    for scheme in ("light", "dark"):
        page, requested = open_page(reports[name], width, scheme)
        assert requested == [reports[name].as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OVERFLOWING) == []
        assert page.evaluate(TOUCHING) == []
        assert page.evaluate(CUT) == []
        backgrounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        photograph_whole(page, f"profile-{name}-{scheme}-{width}")
    assert backgrounds == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 28)"}


@pytest.mark.timeout(120)
def test_pictures_have_names_and_values(reports: dict[str, Path], open_page: OpenPage) -> None:
    """A screen reader finds each picture; a pointer finds the value of a segment, a span and a cell."""
    page, _ = open_page(reports["8-ranks"], 1200, "light")
    assert page.get_by_role("img", name=re.compile("Timeline of update")).count() == 1
    assert page.get_by_role("img", name=re.compile("Rank 1 is latest")).count() == 1
    assert page.locator('.bar > span[title^="backward: "]').count() == 8
    assert re.fullmatch(r"data: \d\.\d+ ms, from 0\.00 ms on\ntrain\.py:7", str(
        page.locator('.track > span[title^="data: "]').first.get_attribute("title")
    ))  # fmt: skip
    assert page.locator(".heat rect title").count() == 8 * 200
    widths = page.locator(".bar").nth(0).evaluate("bar => [...bar.children].map(each => each.offsetWidth)")
    assert sum(widths) == pytest.approx(page.locator(".bar").nth(0).evaluate("bar => bar.offsetWidth"), rel=0.02)


CELL = """%%ddp --profile
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
data = TensorDataset(torch.randn(320, 8), torch.randint(2, (320,)))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(data, batch_size=8, sampler=DistributedSampler(data)):
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


@pytest.mark.timeout(180)
def test_a_profiled_cell_shows_its_pictures(lab: Lab, open_tab: OpenNotebook) -> None:
    """Below the cell, in the theme of JupyterLab; `plot()` gives one figure."""
    tab = open_tab(lab.put("profile.ipynb", ["%load_ext ddpilot\n%ddp start -n 2", CELL, "_.plot()"]))
    tab.run(0)
    shown = tab.run(1)
    assert "16 updates of 2 ranks, from the 5th on" in shown
    report = tab.cell(1).locator(".ddpilot-profile")
    assert report.get_by_role("img").count() == 5
    assert report.evaluate("report => report.scrollWidth <= report.clientWidth + 1")
    tab.run(2)
    assert len(tab.images(2)) == 1
    assert failed(tab.saved_cells()) == []
    tab.page.set_viewport_size({"width": 1280, "height": 2400})
    for theme in ("Light", "Dark"):
        tab.theme(theme)
        tab.photograph(f"profile-notebook-{theme.lower()}", 1)
    tab.photograph("profile-notebook-plot", 2)
