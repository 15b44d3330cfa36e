# SPDX-License-Identifier: Apache-2.0
"""Where pictures are, and how they are written: each one light and dark, and small enough for a README."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Literal

Scheme = Literal["light", "dark"]

SCHEMES: tuple[Scheme, ...] = ("light", "dark")
FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
LARGEST_BYTES = 200_000
NAMES = {
    "hang": "png",
    "board": "png",
    "error": "png",
    "timeline": "png",
    "scaling": "png",
    "same_losses": "svg",
    "resume": "svg",
    "missing_node": "svg",
    "processes": "svg",
}
"""Every picture, with the format of its two files."""

_NUM_COLORS = 128


def path_of(name: str, scheme: Scheme) -> Path:
    """Return the file of a picture in one of the two schemes."""
    return FOLDER / f"{name}-{scheme}.{NAMES[name]}"


def write_svg(name: str, scheme: Scheme, text: str) -> None:
    """Write an SVG, without blanks at the ends of lines."""
    FOLDER.mkdir(exist_ok=True)
    path_of(name, scheme).write_text("\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n")


def write_screenshot(name: str, scheme: Scheme, png: bytes) -> None:
    """Write a screenshot with a palette of 128 colors, which is a third of its bytes."""
    from PIL import Image

    FOLDER.mkdir(exist_ok=True)
    with Image.open(io.BytesIO(png)) as image:
        few = image.convert("RGB").quantize(_NUM_COLORS, dither=Image.Dither.NONE)
        few.save(path_of(name, scheme), optimize=True)


def for_each_scheme(draw: Callable[[Scheme], str], name: str) -> None:
    """Write the SVG that `draw` returns, light and dark."""
    for scheme in SCHEMES:
        write_svg(name, scheme, draw(scheme))
