# SPDX-License-Identifier: Apache-2.0
"""What has to be in the sdist and the wheel, what must not be, and the lowest releases that the wheel allows."""

from __future__ import annotations

import ast
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from email import message_from_string
from email.message import Message
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

UNWANTED = re.compile(
    r"(^|/)(tests?|benchmarks|build|out|\.[^/]+|__pycache__|[^/]+\.egg-info)/|\.(pyc|pyo|orig|rej|so|log)$"
)
"""Tests, caches, hidden folders and left-over builds."""

SDIST_EXTRA = ("CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml", "setup.py")
METADATA = ("Summary", "Keywords", "Classifier", "License-Expression", "Requires-Python", "Description-Content-Type")


def read_metadata(wheel: Path) -> Message:
    """Return the headers of the wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_string(archive.read(name).decode())


def lowest_requirements(wheel: Path, python: str, extra: str = "notebook") -> list[str]:
    """Return pins such as "torch==2.6.*": what the wheel needs with `extra`, each in its lowest release.

    A release that the wheel does not limit from below is not pinned.
    """
    pins = []
    for line in read_metadata(wheel).get_all("Requires-Dist", []):
        needed = Requirement(line)
        where = {"python_version": python, "extra": extra}
        floors = [each.version for each in needed.specifier if each.operator == ">="]
        if floors and (needed.marker is None or needed.marker.evaluate(where)):
            pins.append(f"{needed.name}=={floors[0]}.*")
    return pins


def find_faults(sdist: Path, wheel: Path, root: Path) -> list[str]:
    """Return what is missing, unwanted or wrong in the archives of the checkout `root`; empty if nothing is."""
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = archive.namelist()
    with tarfile.open(sdist) as packed:
        in_sdist = [name.partition("/")[2] for name in packed.getnames() if "/" in name]
    package = [path.relative_to(root / "src").as_posix() for path in _source_files(root)]
    return [
        *_compare("wheel", in_wheel, [*package, "ddpilot_watch.pth"]),
        *_compare("sdist", in_sdist, [*(f"src/{name}" for name in package), *SDIST_EXTRA]),
        *([] if any(name.endswith("licenses/LICENSE") for name in in_wheel) else ["wheel: no LICENSE"]),
        *_metadata_faults(read_metadata(wheel), wheel, root),
    ]


def _source_files(root: Path) -> Iterator[Path]:
    """Yield what the wheel has to hold: modules, py.typed, the pages of the findings."""
    package = root / "src" / "ddpilot"
    yield from sorted(package.rglob("*.py"))
    yield package / "py.typed"
    yield from sorted((package / "findings" / "pages").glob("*.md"))


def _compare(archive: str, names: Iterable[str], wanted: Iterable[str]) -> Iterator[str]:
    found = set(names)
    yield from (f"{archive}: no {name}" for name in wanted if name not in found)
    for name in sorted(found):
        inside = name.removeprefix("src/ddpilot.egg-info/")  # setuptools puts it into every sdist
        if UNWANTED.search(inside) and not PurePosixPath(name).match("ddpilot-*.dist-info/*"):
            yield f"{archive}: {name} does not belong in it"


def _metadata_faults(metadata: Message, wheel: Path, root: Path) -> Iterator[str]:
    yield from (f"metadata: no {name}" for name in METADATA if not metadata.get(name))
    if metadata["Version"] != wheel.name.split("-")[1]:
        yield f"metadata: version {metadata['Version']} in {wheel.name}"
    address = read_address(root)
    links = metadata.get_all("Project-URL", [])
    if bool(address) != bool(links) or any(address not in link for link in links):
        yield f"metadata: links {links}, and PROJECT_URL is {address!r}"


def read_address(root: Path) -> str:
    """Return PROJECT_URL of the checkout `root` without importing the package."""
    tree = ast.parse((root / "src" / "ddpilot" / "_project.py").read_text())
    (value,) = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    return str(ast.literal_eval(value))
