# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/pictures: each is there light and dark, readable in size, small in bytes and free of paths."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from pictures.__main__ import DRAWN_BY
from pictures.files import FOLDER, LARGEST_BYTES, NAMES, SCHEMES, Scheme, path_of

ROOT = Path(__file__).parents[1]
FILES = [pytest.param(name, scheme, id=f"{name}-{scheme}") for name in NAMES for scheme in SCHEMES]


@pytest.mark.parametrize(("name", "scheme"), FILES)
def test_a_picture_is_small_and_of_its_scheme(name: str, scheme: Scheme) -> None:
    """Below 200 kB; a screenshot is wide enough, has more than a few colors, and its scheme's background."""
    path = path_of(name, scheme)
    assert 1000 < path.stat().st_size < LARGEST_BYTES
    if path.suffix == ".svg":
        root = ElementTree.fromstring(path.read_text())
        assert len([*root.iter()]) > 10
        assert not re.search(r"/(root|home|work|Users|tmp)/", "".join(root.itertext()))
        return
    with Image.open(path) as image:
        assert 1000 <= image.width <= 2000
        assert 200 <= image.height <= 2000
        colors = image.convert("RGB").getcolors(1 << 16)
    assert colors is not None
    assert len(colors) > 20
    _, most_common = max(colors)
    assert isinstance(most_common, tuple)
    assert (sum(most_common) > 3 * 128) == (scheme == "light")


def test_the_two_schemes_show_the_same() -> None:
    """Both files of a screenshot have the same size."""
    for name in (name for name, kind in NAMES.items() if kind == "png"):
        with Image.open(path_of(name, "light")) as light, Image.open(path_of(name, "dark")) as dark:
            assert light.size == dark.size, name


def test_there_are_no_other_pictures() -> None:
    """Every file of the folder is drawn by `make pictures`."""
    assert {path.name for path in FOLDER.iterdir()} == {path_of(name, each).name for name in NAMES for each in SCHEMES}
    assert {*DRAWN_BY} - {"notebooks", "reports"} <= {*NAMES}


def test_the_gallery_shows_each_picture_once() -> None:
    """Light and dark, with a text for those who do not see it."""
    page = (ROOT / "docs" / "gallery.md").read_text()
    shown = re.findall(r'(?:srcset|src)="pictures/([^"]+)"', page)
    assert sorted(shown) == sorted(path.name for path in FOLDER.iterdir())
    assert len(re.findall(r'<img alt="[^"]{20,}"', page)) == len(NAMES)
