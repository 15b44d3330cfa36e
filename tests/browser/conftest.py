# SPDX-License-Identifier: Apache-2.0
"""One JupyterLab for all browser tests; each test has a Chromium of its own and ends its kernels."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import find_chromium
from tests.browser.lab import Lab
from tests.browser.person import LIMIT_S, NotebookTab, open_notebook, photograph

OpenNotebook = Callable[[str], NotebookTab]
_VIEWPORT = {"width": 1280, "height": 1100}


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A JupyterLab whose folders end with it."""
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        one = Lab(Path(folder))
        try:
            yield one
        finally:
            one.stop()


@pytest.fixture(scope="session")
def playwright() -> Iterator[Any]:
    """What drives browsers."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        yield driver


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser. Without one the test fails: one that is not run must not look like one that passed."""
    return find_chromium()


@pytest.fixture
def open_tab(lab: Lab, playwright: Any, chromium: str, request: pytest.FixtureRequest) -> Iterator[OpenNotebook]:
    """Opens a notebook of `lab` by its name, in a browser that a person has just started.

    After it the kernels are ended. A test that failed leaves a picture of how the page looked.
    """
    browser = playwright.chromium.launch(executable_path=chromium)
    failed_before = request.session.testsfailed
    try:
        page = browser.new_page(viewport=_VIEWPORT)
        page.set_default_timeout(1000 * LIMIT_S)
        yield lambda name: open_notebook(page, lab, name)
        if request.session.testsfailed > failed_before:
            photograph(page, f"failed-{request.node.name}")
            print(f"JupyterLab's last lines:\n{lab.last_lines()}")
    finally:
        browser.close()
        lab.end_kernels()
        lab.forget_theme()
