# SPDX-License-Identifier: Apache-2.0
"""`ScopedTree`: one parsed file, with the scopes of its names, and where a node is."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Loop = ast.For | ast.AsyncFor | ast.While


@dataclass(frozen=True, eq=False)
class Binding:
    """A value that a name gets."""

    statement: ast.AST
    kind: str
    """``value``, ``item`` (of an iterable or a context), ``param``, ``import``, ``def`` or ``update``."""
    value: ast.AST | None = None
    index: int | None = None
    """Which element of the value, for ``a, b = value``."""
    dotted: str = ""
    """The imported name."""


@dataclass
class Scope:
    """The names of a module, class or function."""

    node: ast.AST
    outer: Scope | None
    names: dict[str, list[Binding]] = field(default_factory=lambda: defaultdict(list))


class ScopedTree:
    """The syntax tree of a file. Raises `SyntaxError`, `ValueError` or `RecursionError` if it cannot be parsed."""

    def __init__(self, text: str, cells: Sequence[range] = ()) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.cells = cells
        """The lines of each cell of a notebook; empty for a script."""
        self.parents: dict[ast.AST, ast.AST] = {}
        self.fields: dict[ast.AST, str] = {}
        """The field of its parent that a node is in, such as ``orelse``."""
        self.nodes: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        self.functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = defaultdict(list)
        self.stars: list[str] = []
        self._scopes: dict[ast.AST, Scope] = {}
        self._attributes: dict[tuple[ast.AST | None, str], list[Binding]] = defaultdict(list)
        self._read()

    # Reading

    def _read(self) -> None:
        top = Scope(self.tree, None)
        self._scopes[self.tree] = top
        stack: list[tuple[ast.AST, Scope]] = [(self.tree, top)]
        while stack:
            node, scope = stack.pop()
            self.nodes[type(node)].append(node)
            self._bind(node, scope)
            inner = scope
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
                inner = self._scopes[node] = Scope(node, scope)
                if not isinstance(node, ast.ClassDef):
                    for each in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
                        inner.names[each.arg].append(Binding(node, "param", node, dotted=each.arg))
            children = []
            for name, value in ast.iter_fields(node):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST) and not isinstance(child, ast.expr_context):
                        self.parents[child] = node
                        self.fields[child] = name
                        children.append((child, inner))
            stack += reversed(children)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Import():
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    scope.names[name].append(Binding(node, "import", dotted=alias.name if alias.asname else name))
            case ast.ImportFrom():
                for alias in node.names:
                    if alias.name == "*":
                        self.stars.append(node.module or "")
                    dotted = f"{'.' * node.level}{node.module or ''}.{alias.name}"
                    scope.names[alias.asname or alias.name].append(Binding(node, "import", dotted=dotted))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.functions[node.name].append(node)
                scope.names[node.name].append(Binding(node, "def", node))
            case ast.ClassDef():
                scope.names[node.name].append(Binding(node, "def", node))
            case ast.Assign():
                for target in node.targets:
                    self._bind_target(target, node.value, node, scope)
            case ast.AnnAssign() | ast.NamedExpr() if node.value is not None:
                self._bind_target(node.target, node.value, node, scope)
            case ast.AugAssign():
                self._bind_target(node.target, node.value, node, scope, kind="update")
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                self._bind_target(node.target, node.iter, node, scope, kind="item")
            case ast.withitem() if node.optional_vars is not None:
                self._bind_target(node.optional_vars, node.context_expr, node, scope, kind="item")

    def _bind_target(
        self,
        target: ast.expr,
        value: ast.expr,
        node: ast.AST,
        scope: Scope,
        kind: str = "value",
        index: int | None = None,
    ) -> None:
        binding = Binding(node, kind, value, index)
        if isinstance(target, ast.Name):
            scope.names[target.id].append(binding)
        elif isinstance(target, ast.Attribute):
            self._attributes[self._owner(target.value, scope), target.attr].append(binding)
        elif isinstance(target, (ast.Tuple, ast.List)):
            alike = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts) and kind == "value"
            for i, each in enumerate(target.elts):
                if alike:
                    assert isinstance(value, (ast.Tuple, ast.List))
                    self._bind_target(each, value.elts[i], node, scope, kind)
                else:
                    self._bind_target(each, value, node, scope, kind, i)

    def _owner(self, value: ast.expr, scope: Scope) -> ast.AST | None:
        """Return the class in whose method `value` is ``self``; None for any other object."""
        function, outer = scope.node, scope.outer
        is_method = isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and function.args.args
        if is_method and outer is not None and isinstance(outer.node, ast.ClassDef) and isinstance(value, ast.Name):
            assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            return outer.node if value.id == function.args.args[0].arg else None
        return None

    # Where a node is

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around `node`, innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function_of(self, node: ast.AST) -> ast.AST:
        """Return the function around `node`, or the module."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
        return next((each for each in self.ancestors(node) if isinstance(each, kinds)), self.tree)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the innermost class around `node`."""
        return next((each for each in self.ancestors(node) if isinstance(each, ast.ClassDef)), None)

    def statement_of(self, node: ast.AST) -> ast.AST:
        """Return the statement that `node` is in, or is."""
        return next((each for each in [node, *self.ancestors(node)] if isinstance(each, ast.stmt)), node)

    def loops_of(self, node: ast.AST) -> list[Loop]:
        """Return the loops around `node` within its function, innermost first."""
        found: list[Loop] = []
        child = node
        for each in self.ancestors(node):
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                break
            if isinstance(each, (ast.For, ast.AsyncFor, ast.While)) and self.fields[child] == "body":
                found.append(each)
            child = each
        return found

    def inside(self, node: ast.AST, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        """Yield the nodes of `kinds` inside `node`, without those of functions defined in it."""
        stack = list(ast.iter_child_nodes(node))
        while stack:
            child = stack.pop()
            if isinstance(child, kinds):
                yield child
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                stack += ast.iter_child_nodes(child)

    # What a name has

    def bindings(self, node: ast.Name) -> list[Binding]:
        """Return the values that a name may have where it is read, or in its scope if it is read in an inner one."""
        own: Scope | None = self._scopes[self._scope_node(node)]
        scope = own
        while scope is not None:
            if node.id in scope.names and (scope is own or not isinstance(scope.node, ast.ClassDef)):
                return self._reaching(scope.names[node.id], node if scope is own else None, scope.node)
            scope = scope.outer
        return []

    def _scope_node(self, node: ast.AST) -> ast.AST:
        return next((each for each in self.ancestors(node) if each in self._scopes), self.tree)

    def _reaching(self, bound: Sequence[Binding], node: ast.AST | None, scope: ast.AST) -> list[Binding]:
        """Return the bindings that may hold at `node`, latest first; at the end of the scope if `node` is None."""
        at = _position(self.statement_of(node)) if node is not None else None
        blocks = self._blocks(node) if node is not None else {(scope, "body")}
        found = []
        for binding in reversed(bound):
            is_head = isinstance(binding.statement, (ast.For, ast.AsyncFor, ast.withitem, ast.comprehension))
            place = self.statement_of(binding.statement)
            is_early = binding.kind in ("param", "import", "def") or (at is not None and _position(place) < at)
            if at is not None and not is_early and not (_position(place) == at and is_head):
                continue
            if node is not None and self.exclude_each_other(place, node):
                continue
            found.append(binding)
            if binding.kind != "update" and (binding.kind in ("param", "def") or self._block(place) in blocks):
                break
        return found or list(bound)

    def exclude_each_other(self, one: ast.AST, other: ast.AST) -> bool:
        """Return True if two nodes are in different branches of one condition."""
        branches: dict[ast.AST, str] = {}
        branches.update((up, self.fields[child]) for child, up in self.steps_outwards(one) if isinstance(up, ast.If))
        steps = self.steps_outwards(other)
        return any(branches.get(up, self.fields[child]) != self.fields[child] for child, up in steps)

    def steps_outwards(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield (node, parent) from `node` to the module."""
        while (parent := self.parents.get(node)) is not None:
            yield node, parent
            node = parent

    def _block(self, statement: ast.AST) -> tuple[ast.AST, str]:
        """Return the block that a statement always runs with: blocks of `with` and `try` belong to the one around."""
        parent, name = self.parents.get(statement, self.tree), self.fields.get(statement, "body")
        if isinstance(parent, (ast.With, ast.AsyncWith)) or (isinstance(parent, ast.Try) and name == "body"):
            return self._block(parent)
        return parent, name

    def _blocks(self, node: ast.AST) -> set[tuple[ast.AST, str]]:
        path = [node, *self.ancestors(node)]
        return {self._block(each) for each in path if isinstance(each, ast.stmt)}

    @cached_property
    def imports(self) -> set[str]:
        """The first parts of the names of all imported modules."""
        bound = [each for scope in self._scopes.values() for some in scope.names.values() for each in some]
        return {each.dotted.partition(".")[0] for each in bound if each.kind == "import"} | set(self.stars)


def _position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
