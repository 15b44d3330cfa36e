# SPDX-License-Identifier: Apache-2.0
"""Write docs/reference.md from the docstrings of the public names: `python docs/render_reference.py`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import ddpilot

TARGET = Path(__file__).with_name("reference.md")
HEAD = """<!-- Made by docs/render_reference.py from the docstrings. Edit those, then run it. -->
# Reference

Every public name of `ddpilot`. *Collective* means that every rank of the group has to make the call.
"""


def render_reference() -> str:
    """The whole page: exceptions last, everything else in alphabetical order."""
    values = {name: getattr(ddpilot, name) for name in ddpilot.__all__ if name[0] != "_"}
    errors = {name: value for name, value in values.items() if inspect.isclass(value) and is_error(value)}
    parts = [HEAD]
    parts += [_render_name(name, values[name]) for name in sorted(sorted(values.keys() - errors.keys()), key=str.lower)]
    parts += ["## Errors\n"]
    parts += [_render_name(name, errors[name], level=3) for name in sorted(errors)]
    return "\n".join(parts)


def is_error(value: type) -> bool:
    """Whether it is an exception."""
    return issubclass(value, BaseException)


def public_members(cls: type) -> Iterator[tuple[str, object]]:
    """Methods and properties that ddpilot's own classes define for `cls`, by name; fields are not among them."""
    for name in dir(cls):
        home = next((base for base in cls.__mro__ if name in vars(base)), object)
        value = vars(home).get(name)
        is_member = isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)
        if is_member and not name.startswith("_") and home.__module__.startswith("ddpilot"):
            yield name, value


def field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass, those of its bases included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("ddpilot") and dataclasses.is_dataclass(base):
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(body, ast.ClassDef)
            for field, text in zip(body.body, body.body[1:], strict=False):
                is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                    found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))  # type: ignore[attr-defined]
    return found


def _render_name(name: str, value: object, level: int = 2) -> str:
    lines = [f"{'#' * level} {name}\n"]
    if inspect.isfunction(value):
        lines.append(f"```python\n{_signature(name, value)}\n```\n")
    lines.append(f"{inspect.getdoc(value) or ''}\n")
    if inspect.isclass(value):
        docs = field_docs(value)
        if dataclasses.is_dataclass(value):
            lines += [_render_field(field, docs) for field in dataclasses.fields(value) if field.init]
            lines.append("")
        if not is_error(value):
            lines += [_render_member(name, member, what) for member, what in public_members(value)]
    return "\n".join(lines)


def _render_field(field: dataclasses.Field[object], docs: dict[str, str]) -> str:
    default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
    return f"- `{field.name}: {field.type}{default}` {' '.join(docs.get(field.name, '').split())}"


def _render_member(owner: str, name: str, value: object) -> str:
    function = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
    assert inspect.isfunction(function)
    shown = f"{owner}.{name}" if isinstance(value, property) else _signature(f"{owner}.{name}", function)
    return f"`{shown}`\n: {' '.join((inspect.getdoc(function) or '').split())}\n"


def _signature(name: str, function: object) -> str:
    assert callable(function)
    text = str(inspect.signature(function)).replace("(self, /, ", "(").replace("(self, ", "(").replace("(self)", "()")
    return name + re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are text, shown without their quotes


if __name__ == "__main__":
    TARGET.write_text(render_reference())
