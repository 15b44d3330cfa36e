# SPDX-License-Identifier: Apache-2.0
"""The checks of `make dist`: pairs, contents, the table of what was run and what was not."""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.check_dist import Outcome, Pair, StepError, check_pair, find_python, parse_pair, render_outcomes, run_step
from tools.dist_contents import SDIST_EXTRA, find_faults, lowest_requirements

METADATA = """\
Version: 1.0
Summary: s
Keywords: k
Classifier: c
License-Expression: Apache-2.0
Requires-Python: >=3.10
Description-Content-Type: text/markdown
Requires-Dist: torch>=2.6
Requires-Dist: numpy
Requires-Dist: tomli>=2; python_version < "3.11"
Requires-Dist: ipykernel>=6.29; extra == "notebook"
Requires-Dist: flask>=3; extra == "dev"
"""
THIS_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
IN_PACKAGE = ("__init__.py", "_project.py", "py.typed", "findings/pages/DDP201.md")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with four files, and both of its archives in `out`."""
    for name in IN_PACKAGE:
        path = tmp_path / "src" / "ddpilot" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('PROJECT_URL = ""\n' if name == "_project.py" else "")
    (tmp_path / "out").mkdir()
    names = [*(f"ddpilot/{name}" for name in IN_PACKAGE), "ddpilot_watch.pth", "ddpilot-1.0.dist-info/licenses/LICENSE"]
    write_archives(tmp_path, names, [*(f"src/ddpilot/{name}" for name in IN_PACKAGE), *SDIST_EXTRA])
    return tmp_path


def write_archives(root: Path, in_wheel: list[str], in_sdist: list[str]) -> None:
    """Write a wheel and an sdist with these files."""
    with zipfile.ZipFile(root / "out" / "ddpilot-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("ddpilot-1.0.dist-info/METADATA", METADATA)
        for name in in_wheel:
            archive.writestr(name, "")
    with tarfile.open(root / "out" / "ddpilot-1.0.tar.gz", "w:gz") as packed:
        for name in in_sdist:
            packed.addfile(tarfile.TarInfo(f"ddpilot-1.0/{name}"), io.BytesIO())


def faults(root: Path) -> list[str]:
    """What is wrong in the archives of `root`."""
    return find_faults(root / "out" / "ddpilot-1.0.tar.gz", root / "out" / "ddpilot-1.0-py3-none-any.whl", root)


def test_find_faults_accepts_what_belongs_in_the_archives(checkout: Path) -> None:
    """Modules, py.typed, pages, the .pth file, the licence."""
    assert faults(checkout) == []


def test_find_faults_names_what_is_missing_or_unwanted(checkout: Path) -> None:
    """Each file by its name."""
    (checkout / "src" / "ddpilot" / "new.py").write_text("")
    write_archives(checkout, ["ddpilot/py.typed", "ddpilot/__pycache__/a.pyc"], ["tests/test_docs.py"])
    found = faults(checkout)
    assert "wheel: no ddpilot/new.py" in found
    assert "wheel: no ddpilot_watch.pth" in found
    assert "wheel: no LICENSE" in found
    assert "wheel: ddpilot/__pycache__/a.pyc does not belong in it" in found
    assert "sdist: tests/test_docs.py does not belong in it" in found


def test_find_faults_wants_links_once_there_is_an_address(checkout: Path) -> None:
    """The metadata has them if and only if PROJECT_URL is set."""
    (checkout / "src" / "ddpilot" / "_project.py").write_text('PROJECT_URL = "https://example.org/ddpilot"\n')
    assert faults(checkout) == ["metadata: links [], and PROJECT_URL is 'https://example.org/ddpilot'"]


def test_lowest_requirements_pins_what_the_wheel_limits(checkout: Path) -> None:
    """Of this Python and extra, each in its lowest release."""
    wheel = checkout / "out" / "ddpilot-1.0-py3-none-any.whl"
    assert lowest_requirements(wheel, "3.11") == ["torch==2.6.*", "ipykernel==6.29.*"]
    assert lowest_requirements(wheel, "3.10") == ["torch==2.6.*", "tomli==2.*", "ipykernel==6.29.*"]


def test_parse_pair_reads_a_python_and_a_torch() -> None:
    """Anything else is refused with the form."""
    assert parse_pair("3.12:lowest") == Pair(python="3.12", torch="lowest")
    assert parse_pair("3.11:2.13.0") == Pair(python="3.11", torch="2.13.0")
    for text in ("3.11", "3.9:newest", "3.11:oldest"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not PYTHON:TORCH, such as"):
            parse_pair(text)


def test_find_python_finds_this_one_and_no_other_version() -> None:
    """The interpreter that runs has the version that was asked for."""
    assert find_python(THIS_PYTHON) == Path(sys.executable)
    assert find_python("3.0") is None


def test_pair_is_not_run_without_its_python_or_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is in the outcome."""
    outcome = check_pair(Pair(python="3.0", torch="newest"), tmp_path, tmp_path, types=False)
    assert (outcome.state, outcome.detail) == ("not run", "no Python 3.0 on the PATH or in pyenv")
    usage = type(shutil.disk_usage(tmp_path))(10**12, 10**12, 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    outcome = check_pair(Pair(python=THIS_PYTHON, torch="newest"), tmp_path, tmp_path, types=False)
    assert outcome.state == "not run"
    assert outcome.detail.startswith("1 GiB free in ")


def test_run_step_shows_what_a_failed_command_printed(tmp_path: Path) -> None:
    """And its exit status; with `fails`, a command that succeeds is the error."""
    with pytest.raises(StepError, match=r"step: exit status 3\n +why"):
        run_step("step", sys.executable, "-c", "print('why'); raise SystemExit(3)", cwd=tmp_path)
    with pytest.raises(StepError, match="step: exit status 0"):
        run_step("step", sys.executable, "-c", "", cwd=tmp_path, fails=True)


def test_render_outcomes_says_what_was_run_and_what_was_not() -> None:
    """A line for each pair, and the counts."""
    text = render_outcomes(
        [
            Outcome(pair=Pair(python="3.11", torch="lowest"), state="passed", torch="2.6.0", wall_s=61.0),
            Outcome(pair=Pair(python="3.13", torch="newest"), state="not run", detail="no Python 3.13"),
        ]
    )
    first, second, counts = text.splitlines()
    assert first.split() == ["3.11:lowest", "passed", "torch", "2.6.0", "61", "s"]
    assert second.split(maxsplit=3) == ["3.13:newest", "not", "run", "no Python 3.13"]
    assert counts == "1 passed, 0 FAILED, 1 not run"
