# SPDX-License-Identifier: Apache-2.0
"""The text of a program: its files, the calls in them, and what lint finds."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from ddpilot.diagnose.ladder.sources import read_sources
from ddpilot.diagnose.verify.target import Program, find_program

TRAIN = """\
import torch
import torch.distributed as dist
from parts.model import build


def main():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(build())


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script with a module of its own, which does not parse, and one that does."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("from parts import broken\n")
    (tmp_path / "parts" / "broken.py").write_text("def (\n")
    (tmp_path / "parts" / "model.py").write_text("import torch\ndef build():\n    return torch.load('a.pt')\n")
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path / "train.py"


def test_modules_next_to_a_script_are_read_with_it(script: Path) -> None:
    """The first call has its file and line; a file that cannot be parsed is left out."""
    found = read_sources(find_program(str(script), (), {}))
    assert len(found.files) == 3
    line = found.find_call("torch.load")
    assert line is not None
    assert (Path(line.file).name, line.line, line.text) == ("model.py", 3, "return torch.load('a.pt')")
    assert found.find_call("torch.save") is None
    guard = found.find_main_guard()
    assert guard is not None
    assert guard.line == 11


def test_lint_reports_with_code_and_line(script: Path) -> None:
    """The process group is never destroyed."""
    (finding,) = [each for each in read_sources(find_program(str(script), (), {})).findings if each.code == "DDP605"]
    assert finding.place.text == 'dist.init_process_group("gloo")'


def test_a_function_is_read_from_its_file(script: Path) -> None:
    """By its name in a file, or as an object with arguments."""
    assert read_sources(find_program(f"{script}:main", (), {})).find_main_guard() is not None
    fn: Any = functools.partial(test_lint_reports_with_code_and_line, Path())
    names = [Path(each.name).name for each in read_sources(Program(name="f", fn=fn)).files]
    assert names[0] == "test_sources.py"


def test_a_function_without_a_file_has_no_source() -> None:
    """Neither a builtin nor a function of generated text."""
    namespace: dict[str, Any] = {}
    exec(compile("def made(): pass", "<generated>", "exec"), namespace)
    assert read_sources(Program(name="made", fn=namespace["made"])).files == ()
    assert read_sources(Program(name="print", fn=print)).files == ()
