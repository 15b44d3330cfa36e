# SPDX-License-Identifier: Apache-2.0
"""Probes write each kind of note with the type that `NOTES` declares for it; mypy checks the fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ddpilot.guard
from ddpilot.guard.notes import NOTES

FOLDER = Path(ddpilot.guard.__file__).parent


def written(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Kind and type of each note that `function` writes; an empty type if it does not build the note."""
    types = {
        target.id: node.value.func.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(function):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "write"):
            continue
        kind, *rest = node.args
        if isinstance(kind, ast.Constant) and rest:
            note = rest[0]
            name = note.id if isinstance(note, ast.Name) else ""
            is_built = isinstance(note, ast.Call) and isinstance(note.func, ast.Name)
            built = note.func.id if is_built else types.get(name, "")  # type: ignore[attr-defined]
            yield str(kind.value), built if built.endswith("Note") else ""


def test_probes_write_notes_of_the_declared_types() -> None:
    """Every kind that is written is declared, and the other way round."""
    functions = [
        node
        for path in FOLDER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    pairs = {pair for function in functions for pair in written(function)}
    wrong = [(kind, name) for kind, name in pairs if kind not in NOTES or name not in ("", NOTES[kind].__name__)]
    assert not wrong
    through_a_helper = {"frozen", "left_out"}
    assert {kind for kind, _ in pairs} | through_a_helper == NOTES.keys()
