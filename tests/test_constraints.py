# SPDX-License-Identifier: Apache-2.0
"""Can what constraints.txt pins be installed on every Python that its lines are for?"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PYTHONS = [f"3.{minor}.{patch}" for minor in range(10, 14) for patch in range(10)]


def test_every_pin_takes_the_pythons_that_its_line_is_for() -> None:
    """No release that is pinned for Python 3.11 needs 3.11.5: Debian's would find none, and `make setup` would end."""
    refused = []
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        needed = _needed_python(pin)
        for python in PYTHONS:
            where = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
            if (pin.marker is None or pin.marker.evaluate(where)) and needed and not needed.contains(python):
                refused.append(f"{line}: not on {python}")
    assert refused == []


def _needed_python(pin: Requirement) -> SpecifierSet | None:
    """What the release that is pinned says of itself; None where it says nothing or another is installed here."""
    try:
        found = metadata(pin.name)
    except PackageNotFoundError:
        return None
    if found["Version"] not in pin.specifier or "Requires-Python" not in found:
        return None
    return SpecifierSet(found["Requires-Python"])
