# SPDX-License-Identifier: Apache-2.0
"""Write the map of rooms in CONTRIBUTING.md: floors of pyproject.toml, first lines of docstrings of packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "ddpilot"
TARGET = ROOT / "CONTRIBUTING.md"
MARKERS = ("<!-- rooms: made by docs/render_rooms.py -->\n", "<!-- end of rooms -->\n")


def read_floors() -> list[list[str]]:
    """Return the top-level modules and packages of each floor, from the highest one down."""
    contract = re.search(
        r'name = "floors".*?^layers = \[\n(.*?)^\]', (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    assert contract is not None
    return [floor.split(" | ") for floor in re.findall(r'"([^"]+)"', contract[1])]


def rooms_of(name: str) -> Iterator[Path]:
    """Yield the file with the docstring of `name` and of each package inside it, outer packages first."""
    folder = PACKAGE / name
    yield from sorted(folder.rglob("__init__.py")) if folder.is_dir() else [PACKAGE / f"{name}.py"]


def first_line(path: Path) -> str:
    """Return the first line of the docstring of a module; "" if it has none."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def render_rooms() -> str:
    """Return the map: a table with a row for each package, in the order of the floors."""
    rows = ["| room | |", "| --- | --- |"]
    for names in read_floors():
        for name in names:
            for path in rooms_of(name):
                room = path.relative_to(PACKAGE).as_posix().removesuffix("__init__.py")
                depth = "&nbsp;&nbsp;" * (room.count("/") - 1)
                rows.append(f"| {depth}`{room}` | {first_line(path).replace('|', chr(92) + '|')} |")
    floors = "\n".join(" | ".join(names) for names in read_floors())
    return f"\n```text\n{floors}\n```\n\n" + "\n".join(rows) + "\n\n"


def render_page(page: str) -> str:
    """Return `page` with the map between its markers."""
    head, _, rest = page.partition(MARKERS[0])
    return head + MARKERS[0] + render_rooms() + MARKERS[1] + rest.partition(MARKERS[1])[2]


if __name__ == "__main__":
    TARGET.write_text(render_page(TARGET.read_text()))
