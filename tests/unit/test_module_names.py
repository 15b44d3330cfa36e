# SPDX-License-Identifier: Apache-2.0
"""What is named in strings is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import ddpilot
from ddpilot import module_names

PACKAGE = Path(ddpilot.__file__).parent
VALUES = [value for name, value in vars(module_names).items() if name.isupper()]
NAMES = sorted({name for value in VALUES for name in ((value,) if isinstance(value, str) else value)})
DOTTED = re.compile(r"ddpilot(\.[a-z_]\w*)+(:\w+|\.[A-Z]\w+)?")
ENTRY_POINT_GROUP = "ddpilot.apps"
PUBLIC = ("ddpilot/__init__.py", "ddpilot/module_names.py")


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("/")])
def test_module_and_what_it_has_can_be_imported(name: str) -> None:
    """As ``module``, ``module:function`` or ``module.Class``."""
    module, _, attribute = name.partition(":")
    head, _, last = module.rpartition(".")
    if last[0].isupper():
        module, attribute = head, last
    assert importlib.util.find_spec(module) is not None  # importing some of them has effects that only ranks need
    assert not attribute or hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("/")])
def test_path_in_stack_traces_is_there(name: str) -> None:
    """As ``/ddpilot/folder/``, ``/ddpilot/file.py`` or ``/ddpilot/file.py:function``."""
    path, _, function = name.partition(":")
    found = PACKAGE.parent / path.removeprefix("/")
    assert found.is_dir() if path.endswith("/") else found.is_file()
    if function:
        nodes = ast.parse(found.read_text(encoding="utf-8")).body
        assert function in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_no_other_module_has_such_a_string() -> None:
    """Other than public names, and what messages tell the user to call."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        if str(path.relative_to(PACKAGE.parent)) in PUBLIC:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if DOTTED.fullmatch(text) and text != ENTRY_POINT_GROUP:
                found.append(f"{path.relative_to(PACKAGE)}: {text}")
    assert found == []
