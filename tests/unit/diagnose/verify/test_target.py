# SPDX-License-Identifier: Apache-2.0
"""A program is a script, or a function of a file, and wrong words are refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpilot.diagnose.verify.target import _keep, find_program
from ddpilot.errors import LaunchError
from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding

TEXT = "from math import cos as cosine\nimport os.path\nrun = print\nclass Net: ...\ndef train(): ...\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A file with names of all kinds."""
    path = tmp_path / "train.py"
    path.write_text(TEXT)
    return path


def test_script_keeps_its_words(script: Path) -> None:
    """They are those of its command line."""
    program = find_program(str(script), ("--lr", "0.1"), {})
    assert (program.name, program.script, program.args, program.fn) == (
        "train.py",
        str(script),
        ("--lr", "0.1"),
        None,
    )


@pytest.mark.parametrize("name", ["train", "run", "Net", "cosine"])
def test_function_of_a_file_is_looked_up_without_importing_it(name: str, script: Path) -> None:
    """Whatever defines the name at the top level."""
    program = find_program(f"{script}:{name}", (), {})
    assert program.fn is not None
    assert program.args == (str(script.resolve()), name)
    assert program.name == f"{script}:{name}"


@pytest.mark.parametrize(
    ("words", "args", "expected"),
    [
        ("{}:trian", (), "has no function `trian`. Did you mean `train`"),
        ("{}:train", ("3",), "1 words for a command line, which a function does not have"),
        ("{}x", (), "trainx.py|train.pyx"),
        ("{}x:train", (), "train.pyx"),
    ],
)
def test_wrong_words_are_refused(words: str, args: tuple[str, ...], expected: str, script: Path) -> None:
    """With what was found."""
    with pytest.raises(LaunchError, match=expected):
        find_program(words.format(script), args, {})


def test_findings_of_hangs_end_a_run_and_others_do_not() -> None:
    """Wrong numbers are recorded on, ranks that never proceed are stopped."""
    kept: list[Finding] = []
    assert _keep(kept, make_finding("DDP201")) == "stop"
    assert _keep(kept, make_finding("DDP320")) is None
    assert [each.code for each in kept] == ["DDP201", "DDP320"]
