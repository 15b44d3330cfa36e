# SPDX-License-Identifier: Apache-2.0
"""Pictures of reports: where an update's time goes, and how a script scales, both measured here."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pictures.files import SCHEMES, write_screenshot
from tests.browser.chromium import find_chromium

ROOT = Path(__file__).parents[1]

COMMANDS = {
    "timeline": ["profile", "examples/gpt.py", "-n", "2", "--html"],
    "scaling": ["scale", "examples/digits_loop.py", "-n", "1,2", "--html"],
}


def draw() -> None:
    """Draw "timeline" and "scaling"."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser: Any = driver.chromium.launch(executable_path=find_chromium())
        try:
            for name, words in COMMANDS.items():
                path = Path(folder, f"{name}.html")
                subprocess.run([sys.executable, "-m", "ddpilot", *words, str(path)], cwd=ROOT, check=True)
                for scheme in SCHEMES:
                    page = browser.new_page(
                        viewport={"width": 900, "height": 900}, device_scale_factor=1.5, color_scheme=scheme
                    )
                    page.goto(path.as_uri(), wait_until="networkidle")
                    box = page.evaluate(_PICTURES)
                    write_screenshot(name, scheme, page.screenshot(clip=box, full_page=True))
        finally:
            browser.close()


_PICTURES = """() => {
    const drawn = [...document.querySelectorAll("[role=img]")].map(each => each.getBoundingClientRect());
    const headings = [...document.querySelectorAll("h2")].map(each => each.getBoundingClientRect().top);
    const top = Math.max(...headings.filter(each => each < drawn[0].top)) + scrollY - 12;
    return {x: 0, y: top, width: innerWidth, height: Math.ceil(drawn[1].bottom + scrollY + 12 - top)};
}"""
"""The part of a report from the heading above the first picture to the end of the second."""
