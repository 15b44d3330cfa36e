# SPDX-License-Identifier: Apache-2.0
"""Change the text of scripts and notebooks by the fixes of reports. LibCST keeps the format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import unified_diff
from typing import TYPE_CHECKING

from ddpilot.errors import DdpilotError
from ddpilot.lint.linter import Diagnostic, LintOptions, lint_text
from ddpilot.lint.notebook import read_notebook, replace_code

if TYPE_CHECKING:
    import libcst as cst

_MAX_PASSES = 3
"""How often a script is linted again after its fixes: one fix may make a different one possible."""


def fix_text(text: str, path: str, options: LintOptions) -> str:
    """Return a script or notebook with all safe fixes applied. Raises `DdpilotError` if LibCST is not installed."""
    apply = _apply_in_cells if path.endswith(".ipynb") else _apply
    for _ in range(_MAX_PASSES):
        edits = [each for each in lint_text(text, path, options) if each.edit is not None]
        fixed = apply(text, edits) if edits else text
        if fixed == text:
            break
        text = fixed
    return text


def render_diff(before: str, after: str, path: str) -> str:
    """Return the change of a file as a unified diff; empty if there is none."""
    lines = (before.splitlines(keepends=True), after.splitlines(keepends=True))
    return "".join(unified_diff(*lines, fromfile=path, tofile=f"{path} (fixed)"))


def _apply_in_cells(text: str, found: Iterable[Diagnostic]) -> str:
    code, cells = read_notebook(text)
    lines = code.split("\n")
    edits: dict[int, list[Diagnostic]] = {}
    for each in found:
        assert each.edit is not None
        kind, argument = each.edit
        at, _, statement = argument.partition(":")
        line = int(at) if kind == "insert-first" else each.span[0]
        number, cell = next((i, cell) for i, cell in enumerate(cells, 1) if line in cell)
        if kind == "insert-first":
            each = replace(each, edit=(kind, f"{line - cell.start + 1}:{statement}"))
        first, begin, last, end = each.span
        span = (first - cell.start + 1, begin, last - cell.start + 1, end)
        edits.setdefault(number, []).append(replace(each, span=span))
    changed = {}
    for number, some in edits.items():
        before = "\n".join(lines[at - 1] for at in cells[number - 1])
        changed[number] = (before, _apply(before, some))
    return replace_code(text, changed)


def _apply(text: str, found: Iterable[Diagnostic]) -> str:
    try:
        import libcst as cst
        from libcst.metadata import MetadataWrapper, PositionProvider
    except ImportError as error:
        raise DdpilotError("fixing", found="LibCST is not installed", fix="pip install 'ddpilot[lint]'") from error
    calls: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    loops: dict[int, str] = {}
    for each in found:
        assert each.edit is not None
        kind, argument = each.edit
        if kind == "insert-first":
            line, _, statement = argument.partition(":")
            loops[int(line)] = statement
        else:
            calls.setdefault(each.span, []).append(each.edit)

    class Fixer(cst.CSTTransformer):
        METADATA_DEPENDENCIES = (PositionProvider,)

        def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
            where = self.get_metadata(PositionProvider, original_node)
            span = (where.start.line, where.start.column, where.end.line, where.end.column)
            for kind, argument in calls.get(span, ()):
                updated_node = _CHANGES[kind](updated_node, argument)
            return updated_node

        def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:  # noqa: N802
            statement = loops.get(self.get_metadata(PositionProvider, original_node).start.line)
            if statement is None or not isinstance(updated_node.body, cst.IndentedBlock):
                return updated_node
            body = [cst.parse_statement(statement), *updated_node.body.body]
            return updated_node.with_changes(body=updated_node.body.with_changes(body=body))

    try:
        module = cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        raise SyntaxError(f"LibCST: {error.message}") from error
    return MetadataWrapper(module).visit(Fixer()).code


def _remove_argument(call: cst.Call, name: str) -> cst.Call:
    kept = [each for each in call.args if each.keyword is None or each.keyword.value != name]
    if kept and kept[-1] is not call.args[-1]:  # the end of the list stays as it was
        kept[-1] = kept[-1].with_changes(comma=_last_comma(kept[-1].comma, call.args[-1].comma))
    return call.with_changes(args=kept)


def _last_comma(
    own: cst.Comma | cst.MaybeSentinel, last: cst.Comma | cst.MaybeSentinel
) -> cst.Comma | cst.MaybeSentinel:
    """Return the comma of an argument that is now the last one: a comment behind it stays."""
    import libcst as cst

    if not isinstance(own, cst.Comma) or not isinstance(last, cst.Comma):
        return last
    space, end = own.whitespace_after, last.whitespace_after
    if not isinstance(space, cst.ParenthesizedWhitespace) or not isinstance(end, cst.ParenthesizedWhitespace):
        return last
    return own.with_changes(whitespace_after=space.with_changes(indent=end.indent, last_line=end.last_line))


def _add_argument(call: cst.Call, text: str) -> cst.Call:
    import libcst as cst

    added = cst.ensure_type(cst.parse_expression(f"f({text})"), cst.Call).args[0]
    *others, last = call.args
    if not isinstance(last.comma, cst.Comma):
        return call.with_changes(args=[*call.args, added])
    between = others[-1].comma if others else cst.Comma(whitespace_after=call.whitespace_before_args)
    own, end = cst.ensure_type(between, cst.Comma), last.comma
    if isinstance(own.whitespace_after, cst.ParenthesizedWhitespace):
        space, behind = own.whitespace_after, cst.TrailingWhitespace()
        if isinstance(end.whitespace_after, cst.ParenthesizedWhitespace):  # a comment stays with its argument
            behind, plain = end.whitespace_after.first_line, cst.TrailingWhitespace()
            end = end.with_changes(whitespace_after=end.whitespace_after.with_changes(first_line=plain))
        own = own.with_changes(whitespace_after=space.with_changes(first_line=behind))
    return call.with_changes(args=[*others, last.with_changes(comma=own), added.with_changes(comma=end)])


def _insert_module(call: cst.Call, _: str) -> cst.Call:
    import libcst as cst

    method = cst.ensure_type(call.func, cst.Attribute)
    return call.with_changes(func=method.with_changes(value=cst.Attribute(method.value, cst.Name("module"))))


def _move_inside(call: cst.Call, _: str) -> cst.Call:
    import libcst as cst

    method = cst.ensure_type(call.func, cst.Attribute)
    wrap = cst.ensure_type(method.value, cst.Call)
    model = wrap.args[0]
    if not isinstance(model.value, (cst.Name, cst.Attribute, cst.Call)):
        return call
    moved = call.with_changes(func=method.with_changes(value=model.value))
    return wrap.with_changes(args=[model.with_changes(value=moved), *wrap.args[1:]])


def _rename_amp(call: cst.Call, name: str) -> cst.Call:
    import libcst as cst

    device = cst.Arg(cst.SimpleString('"cuda"'))
    return call.with_changes(func=cst.parse_expression(name), args=[device, *call.args])


_CHANGES: Mapping[str, Callable[[cst.Call, str], cst.Call]] = {
    "remove-argument": _remove_argument,
    "add-argument": _add_argument,
    "insert-module": _insert_module,
    "move-inside": _move_inside,
    "rename-amp": _rename_amp,
}
