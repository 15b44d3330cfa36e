# SPDX-License-Identifier: Apache-2.0
"""Files, comments, options, formats, and files that cannot be read."""

from __future__ import annotations

import ast
import json
import os
import sys
import time
from pathlib import Path

import pytest

from ddpilot.cli.lint_command import FORMATS
from ddpilot.errors import DdpilotError
from ddpilot.findings.catalog import make_finding
from ddpilot.lint.flake8_plugin import Plugin
from ddpilot.lint.linter import Diagnostic, LintOptions, find_files, lint_files, lint_text, read_options

BOTH = """from torch.nn import DataParallel
from torch.utils.data import DataLoader, DistributedSampler as S
DataParallel(m)
DataLoader(d, sampler=S(d), shuffle=True)
"""
STRANGE = {
    "print_statement.py": b"import torch\nprint 'Python 2'\n",
    "syntax.py": b"import torch\ndef f(:\n",
    "latin.py": b"# -*- coding: latin-1 -*-\nimport torch\nname = '\xe4'\n",
    "not_utf8.py": b"import torch\nname = '\xff\xfe'\n",
    "unknown_coding.py": b"# coding: no-such\nimport torch\n",
    "nul.py": b"import torch\n\x00\n",
    "empty.py": b"",
    "no_cells.ipynb": b'{"torch": 1}',
    "no_json.ipynb": b"torch",
    "list.ipynb": b'["torch"]',
    "nested.py": b"import torch\nx = " + b"(" * 150 + b")" * 150 + b"\n",
    "deep.py": b"import torch\nx = " + b"-" * 3000 + b"1\n",
    "wide.py": b"import torch\nx = " + b"1 + " * 3000 + b"1\n",
}


def codes_of(text: str, options: LintOptions | None = None, path: str = "train.py") -> list[str]:
    """The codes reported for `text`."""
    return [each.code for each in lint_text(text, path, options or LintOptions())]


def write_notebook(path: Path, *cells: str) -> Path:
    """A notebook of code cells."""
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": each.splitlines(True)} for each in cells]}))
    return path


@pytest.mark.parametrize(
    ("comment", "left"),
    [
        ("# ddpilot: ignore", ["DDP413"]),
        ("# ddpilot: ignore[DDP330]", ["DDP413"]),
        ("# ddpilot: ignore[DDP401, DDP330] as it is", ["DDP413"]),
        ("# ddpilot: ignore[DDP413]", ["DDP330", "DDP413"]),
    ],
)
def test_comment_ignores_codes_on_its_line(comment: str, left: list[str]) -> None:
    """All codes, or those that it names."""
    assert codes_of(BOTH.replace("DataParallel(m)", f"DataParallel(m)  {comment}")) == left


def test_options_select_and_ignore_by_prefix() -> None:
    """`ignore` is the stronger one; a code that no rule has is an error."""
    assert codes_of(BOTH, LintOptions(select=("DDP4",))) == ["DDP413"]
    assert codes_of(BOTH, LintOptions(select=("DDP",), ignore=("DDP413",))) == ["DDP330"]
    with pytest.raises(DdpilotError, match="DDP999"):
        LintOptions(select=("DDP999",))


def test_options_are_read_from_the_nearest_pyproject(tmp_path: Path) -> None:
    """Of the folder or one above; unknown names and types are errors."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    config = tmp_path / "pyproject.toml"
    config.write_text('[tool.ddpilot.lint]\nignore = ["DDP330"]\nexclude = ["old"]\n')
    assert read_options(inner) == LintOptions(ignore=("DDP330",), exclude=("old",))
    for wrong in ('selct = ["DDP4"]', 'select = "DDP4"'):
        config.write_text(f"[tool.ddpilot.lint]\n{wrong}\n")
        with pytest.raises(DdpilotError, match="lists of strings for select, ignore, exclude"):
            read_options(tmp_path)
    config.write_text("not toml")
    with pytest.raises(DdpilotError, match="Correct the file"):
        read_options(tmp_path)


def test_files_are_scripts_and_notebooks_outside_hidden_and_excluded_folders(tmp_path: Path) -> None:
    """A file that is named is always checked; a path that does not exist is an error."""
    left_out = (".venv/d.py", "old/e.py", "__pycache__/g.py", "env/h.py", "env/pyvenv.cfg")
    for name in ("a.py", "b.ipynb", "c.txt", "sub/f.py", *left_out):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    if sys.platform != "win32":
        os.mkfifo(tmp_path / "pipe.py")  # opening it would block
    found = [Path(each).relative_to(tmp_path).as_posix() for each in find_files([str(tmp_path)], ["old"])]
    assert found == ["a.py", "b.ipynb", "sub/f.py"]
    assert list(find_files([str(tmp_path / "c.txt")])) == [str(tmp_path / "c.txt")]
    with pytest.raises(DdpilotError, match="does not exist"):
        list(find_files([str(tmp_path / "none")]))


def test_notebook_reports_name_cell_and_line(tmp_path: Path) -> None:
    """Magics are passed over, and a cell under `%%ddp` counts."""
    cells = ("%pip install torch\nfrom torch import nn", "%%bash\nls", "%%ddp -n 2\n\nx = !ls\nnn.DataParallel(m)")
    path = write_notebook(tmp_path / "a.ipynb", *cells)
    found = lint_text(path.read_text(), str(path))
    assert [(each.cell, each.line, each.code) for each in found] == [(3, 4, "DDP330")]
    assert found[0].place == f"{path}:cell 3:4:1"


@pytest.mark.parametrize("name", STRANGE)
def test_no_file_crashes_the_linter(tmp_path: Path, name: str) -> None:
    """What cannot be parsed is named with the reason; the next file is checked."""
    (tmp_path / name).write_bytes(STRANGE[name])
    (tmp_path / "z.py").write_text(BOTH)
    unread: list[str] = []
    files = list(find_files([str(tmp_path)]))
    found = list(lint_files(files, LintOptions(), lambda path, reason: unread.append(f"{path}: {reason}")))
    assert [each.code for each in found] == ["DDP330", "DDP413"]
    is_readable = name in ("latin.py", "not_utf8.py", "unknown_coding.py", "empty.py", "nested.py", "wide.py")
    assert is_readable or len(unread) == 1 or sys.version_info[:2] != (3, 11)


def test_large_file_is_checked_in_seconds() -> None:
    """A hundred kilobytes of functions that call collectives under conditions."""
    part = "def f{0}(x):\n    if x.rank == {0}:\n        return g(x)\n    dist.all_reduce(x)\n    return f{0}(x)\n\n\n"
    text = "import torch.distributed as dist\n" + "".join(part.format(i) for i in range(1_000))
    started = time.monotonic()
    assert codes_of(text).count("DDP208") == 1_000
    assert time.monotonic() - started < 30


FOUND = [Diagnostic(path="a.py", line=3, column=5, code="DDP330", message="100 % m"),
         Diagnostic(path="b.ipynb", line=1, column=1, code="DDP413", message="n", cell=2)]  # fmt: skip


def test_formats_show_path_line_column_code_and_message() -> None:
    """Each in the words of its readers."""
    assert FORMATS["text"](FOUND) == "a.py:3:5 DDP330 100 % m\nb.ipynb:cell 2:1:1 DDP413 n"
    assert FORMATS["github"](FOUND).splitlines() == [
        "::warning file=a.py,line=3,col=5,title=DDP330::100 %25 m",
        "::error file=b.ipynb,line=1,col=1,title=DDP413::cell 2: n",
    ]
    rows = json.loads(FORMATS["json"](FOUND))
    places = [(row["place"]["file"], row["cell"], row["place"]["line"], row["column"], row["code"]) for row in rows]
    assert places == [("b.ipynb", 2, 1, 1, "DDP413"), ("a.py", None, 3, 5, "DDP330")]
    assert rows[0].keys() - {"cell", "column", "fixable"} == make_finding("DDP413").to_dict().keys()
    run = json.loads(FORMATS["sarif"](FOUND))["runs"][0]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["DDP330", "DDP413"]
    assert [(each["ruleId"], each["level"]) for each in run["results"]] == [("DDP330", "warning"), ("DDP413", "error")]
    assert json.loads(FORMATS["json"]([])) == []
    assert json.loads(FORMATS["sarif"]([]))["runs"][0]["results"] == []


def test_flake8_plugin_gives_line_column_and_text() -> None:
    """flake8 counts columns from 0."""
    found = list(Plugin(ast.parse(BOTH), BOTH.splitlines(keepends=True)).run())
    assert [(line, column, text[:6]) for line, column, text, _ in found] == [(3, 0, "DDP330"), (4, 0, "DDP413")]
