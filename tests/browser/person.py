# SPDX-License-Identifier: Apache-2.0
"""What a person does in JupyterLab, by mouse and keyboard, and what they see there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import nbformat

from tests.browser.lab import Lab

SCREENSHOTS = Path(__file__).parents[2] / "out" / "browser"
"""Where every picture goes; git ignores it, CI keeps it."""

LIMIT_S = 60.0
"""How long anything may take that does not say otherwise."""

# Everything of Playwright's is `Any` to the type checker, which also runs where it is not installed.
Page = Any
Locator = Any


class NotebookTab:
    """An open notebook. Cells are counted from 0 as they stand, text included."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page = page
        self.path = path

    def cell(self, index: int) -> Locator:
        """That cell, prompt, source and output."""
        return self.page.locator(f'.jp-Notebook .jp-Cell[data-windowed-list-index="{index}"]')

    def find(self, text: str) -> int:
        """Index of the code cell whose source contains `text`."""
        source = self.page.locator(".cm-content", has_text=text)
        cells = self.page.locator(".jp-Notebook .jp-CodeCell").filter(has=source)
        return int(cells.first.get_attribute("data-windowed-list-index"))

    def code_cells(self) -> list[int]:
        """Indices of all code cells."""
        indices = self.page.locator(".jp-Notebook .jp-CodeCell").evaluate_all(
            "cells => cells.map(cell => Number(cell.dataset.windowedListIndex))"
        )
        return [int(index) for index in indices]

    def start(self, index: int) -> None:
        """Click into a cell, then on the toolbar's triangle."""
        self.cell(index).locator(".jp-InputArea-prompt").click()
        self._toolbar("Run this cell and advance").click()

    def run(self, index: int, limit_s: float = LIMIT_S) -> str:
        """Run a cell and wait until it is done; the text of its output."""
        self.start(index)
        return self.wait(index, limit_s)

    def wait(self, index: int, limit_s: float = LIMIT_S) -> str:
        """Wait until a cell that was started is done; the text of its output."""
        prompt = self.cell(index).locator(".jp-InputArea-prompt")
        prompt.filter(has_text=re.compile(r"\[\d+\]:")).wait_for(timeout=1000 * limit_s)
        return self._drawn(index)

    def output(self, index: int) -> str:
        """The text under a cell as one sees it now."""
        return "\n".join(text.strip() for text in self.cell(index).locator(".jp-OutputArea-output").all_inner_texts())

    def _drawn(self, index: int) -> str:
        # The prompt has its number once the kernel has answered; what was shown is drawn in the frames after that.
        before, now = None, self.output(index)
        while now != before:
            self.page.wait_for_timeout(100)
            before, now = now, self.output(index)
        return now

    def see(self, index: int, text: str | re.Pattern[str], limit_s: float = LIMIT_S) -> None:
        """Wait until a cell's output has this text somewhere."""
        area = self.cell(index).locator(".jp-OutputArea").first
        area.filter(has_text=text).wait_for(timeout=1000 * limit_s)

    def images(self, index: int) -> list[tuple[int, int]]:
        """Width and height, in pixels of the file, of every picture under a cell."""
        images = self.cell(index).locator(".jp-OutputArea-output img")
        sizes = images.evaluate_all("all => all.map(image => [image.naturalWidth, image.naturalHeight])")
        return [(int(width), int(height)) for width, height in sizes]

    def saved_cells(self) -> list[Any]:
        """Press Ctrl+S, wait until the dot in the tab is gone; the cells as they are in the file."""
        self.page.keyboard.press("Control+s")
        self.page.locator("#jp-main-dock-panel .lm-TabBar-tab.jp-mod-dirty").wait_for(state="hidden")
        return list(nbformat.read(self.path, as_version=4).cells)  # type: ignore[no-untyped-call]

    def press_stop(self) -> None:
        """The toolbar's square."""
        self._toolbar("Interrupt the kernel").click()

    def answer(self, index: int, text: str) -> None:
        """Type into the box in which a cell asks, and press Enter."""
        box = self.cell(index).locator(".jp-Stdin-input")
        box.fill(text)
        box.press("Enter")

    def theme(self, name: Literal["Light", "Dark"]) -> None:
        """Settings > Theme > JupyterLab Light or Dark."""
        entry = self.page.locator(".lm-Menu-item")
        self.page.get_by_role("menuitem", name="Settings", exact=True).click()
        entry.filter(has_text=re.compile("^Theme")).hover()
        entry.filter(has_text=re.compile(f"^JupyterLab {name}$")).click()
        self.page.locator(f'body[data-jp-theme-name="JupyterLab {name}"]').wait_for(state="attached")

    def restart_kernel(self) -> None:
        """The toolbar's arrow, and "Restart" where it asks."""
        self._toolbar("Restart the kernel").click()
        self.page.get_by_role("button", name="Confirm Kernel Restart").click()
        idle = self.page.locator("#jp-main-statusbar").get_by_text("| Idle")
        idle.wait_for(state="hidden")
        idle.wait_for()

    def photograph(self, name: str, index: int | None = None) -> None:
        """A picture of the page, or of one cell, as out/browser/`name`.png."""
        photograph(self.page if index is None else self.cell(index), name)

    def _toolbar(self, title: str) -> Locator:
        # "Restart the kernel" is how "Restart the kernel and run all cells" begins, and some titles end with a key.
        named = re.compile(f"^{title}(?! and)")
        return self.page.locator(".jp-NotebookPanel-toolbar").get_by_role("button", name=named)


def failed(cells: Sequence[Any]) -> list[int]:
    """Those saved cells that have an error below them: on the page it looks like any text on stderr."""
    outputs = {index: cell.get("outputs", ()) for index, cell in enumerate(cells)}
    return [index for index in outputs if any(output.output_type == "error" for output in outputs[index])]


def photograph(target: Page | Locator, name: str) -> None:
    """A picture of a page, or of what is on it, as out/browser/`name`.png."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    # Playwright would write the file in a thread that stays.
    (SCREENSHOTS / f"{name}.png").write_bytes(target.screenshot(animations="disabled"))


def open_notebook(page: Page, lab: Lab, name: str) -> NotebookTab:
    """Go to JupyterLab, double-click on a file, and wait until its kernel is there."""
    page.goto(f"{lab.url}/lab?reset&token={lab.token}")
    page.locator(".jp-DirListing-item", has_text=name).dblclick()
    # Before the file has been read there is one empty cell.
    tab = NotebookTab(page, lab.root / name)
    tab.cell(lab.num_cells(name) - 1).wait_for(state="attached")
    # The circle in the toolbar says "idle" from the start; what is run before there is a kernel is never run.
    page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()
    page.keyboard.press("Control+b")  # the side bar makes room
    return tab
