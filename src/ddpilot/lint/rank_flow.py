# SPDX-License-Identifier: Apache-2.0
"""Find what only some ranks run: code under a condition on the rank, after an early exit, or in a handler."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ddpilot.lint.program import Program, is_constant
from ddpilot.source.control_flow import catches_data_end, is_exit, walk_loop
from ddpilot.source.parsed_file import Source

_NAMES = Source("")
"""Tells names of a rank from other names; what the names of a program are assigned from is `Program`'s to follow."""
_PASS_ON = frozenset(
    {"int", "bool", "str", "float", "any", "all", "max", "min", "get", "getenv", "join", "format", "Path"}
)
"""Functions whose result depends on the rank if an argument does."""
_ONE_WRITER = re.compile(r"should_(?:save|write|log)|world_size (?:<=|==|<) [12]\b|not \w*distributed")
"""Conditions of one rank only that do not name it, or under which there is one rank only."""
_EQUALIZING = ("broadcast", "all_reduce", "broadcast_object_list", "all_gather", "all_gather_object")
_MAX_CALLERS = 4
"""How many calls outwards a condition is searched for."""


@dataclass(frozen=True)
class Guard:
    """Why only some ranks reach a line."""

    kind: Literal["condition", "exit", "handler"]
    node: ast.AST
    """The statement with the condition, the `return`, `break` or `continue`, or the handler or `try`."""
    test: ast.expr | None = None
    is_else: bool = False


class RankFlow:
    """Answers, for one program, which ranks run a line."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[ast.AST, bool] = {}

    @cached_property
    def _reduced(self) -> set[str]:
        """The names of what is passed to a collective that makes it the same on all ranks."""
        calls = self._program.calls_to(*(f"torch.distributed.{name}" for name in _EQUALIZING))
        return {
            e.id for call in calls for e in ast.walk(call) if isinstance(e, ast.Name) and not _NAMES.depends_on_rank(e)
        }

    def differs(self, test: ast.AST, depth: int = 4) -> bool:
        """Return True if the value of `test` depends on the rank, and is not only whether there is a rank at all."""
        if test not in self._known:
            self._known[test] = False  # for names that are assigned from themselves
            self._known[test] = self._differs(test, depth)
        return self._known[test]

    def _differs(self, test: ast.AST, depth: int) -> bool:
        match test:
            case ast.BoolOp():
                return any(self.differs(each, depth) for each in test.values)
            case ast.UnaryOp():
                return self.differs(test.operand, depth)
            case ast.Compare():
                return not _asks_for_a_rank(test) and any(
                    self.differs(e, depth) for e in (test.left, *test.comparators)
                )
            case ast.Name():
                bindings = self._program.bindings(test)
                if test.id in self._reduced:
                    return False
                kinds = {binding.kind for binding in bindings}
                if kinds == {"item"}:
                    return False
                values = [b.value for b in bindings if b.kind == "value" and b.value is not None]
                if values and depth:
                    return any(self.differs(value, depth - 1) for value in values)
            case ast.Attribute():
                values = [each for each in self._program.trace(test)[1:] if isinstance(each, ast.expr)]
                if values and depth:
                    return any(self.differs(value, depth - 1) for value in values)
            case ast.Call():
                callees = self._program.callees(test)
                if callees and depth:
                    returned = [each for callee in callees for each in self._program.inside(callee, ast.Return)]
                    values = [each.value for each in returned if isinstance(each, ast.Return) and each.value]
                    return any(self.differs(value, depth - 1) for value in values)
                passes_on = _last_name(test.func) in _PASS_ON and any(self.differs(each, depth) for each in test.args)
                is_fastai = _last_name(test.func) == "rank_distrib"
                return passes_on or is_fastai or _NAMES.depends_on_rank(test.func)
            case ast.IfExp():
                return any(self.differs(each, depth) for each in (test.test, test.body, test.orelse))
            case ast.BinOp():
                return self.differs(test.left, depth) or self.differs(test.right, depth)
            case ast.Subscript() | ast.JoinedStr() | ast.FormattedValue() | ast.Tuple() | ast.List():
                if any(self.differs(each, depth - 1) for each in ast.iter_child_nodes(test) if depth):
                    return True
        return isinstance(test, ast.expr) and _NAMES.depends_on_rank(test)

    def guards(self, node: ast.AST) -> Iterator[Guard]:
        """Yield why only some ranks reach `node` within its function, innermost first."""
        program, child = self._program, node
        for parent in program.ancestors(node):
            name = program.fields[child]
            if isinstance(parent, (ast.If, ast.IfExp, ast.While)) and name in ("body", "orelse"):
                if self.differs(parent.test) and "__name__" not in ast.unparse(parent.test):
                    yield Guard("condition", parent, parent.test, name == "orelse")
            elif isinstance(parent, ast.BoolOp) and child is not parent.values[0]:
                if any(self.differs(each) for each in parent.values[: parent.values.index(child)]):  # type: ignore[arg-type]
                    yield Guard("condition", parent, parent, isinstance(parent.op, ast.Or))
            elif _is_handler(parent, name):
                yield Guard("handler", parent)
            if isinstance(child, ast.stmt):
                yield from self._exits_before(child, parent, name)
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
                return
            child = parent

    def _exits_before(self, statement: ast.stmt, parent: ast.AST, name: str) -> Iterator[Guard]:
        body = getattr(parent, name, None)
        if not isinstance(body, list):
            return
        is_in_loop = bool(self._program.loops_of(statement))
        for each in body[: body.index(statement)]:
            if not isinstance(each, (ast.If, ast.With, ast.Try)):
                continue
            for node, tests in walk_loop(each):
                leaves = isinstance(node, ast.Return) or is_exit(node)
                leaves = leaves or (is_in_loop and isinstance(node, (ast.Break, ast.Continue)))
                differing = [test for test in [*_test_of(each), *tests] if self.differs(test)]
                if leaves and differing:
                    yield Guard("exit", node, differing[0])

    def rank_guard(self, node: ast.AST) -> Guard | None:
        """Return the condition on the rank, or exit that depends on it, because of which only some ranks run `node`."""
        return next((guard for guard in self.guards(node) if guard.kind != "handler"), None)

    def runs_on_some_ranks(self, node: ast.AST, depth: int = _MAX_CALLERS) -> bool:
        """Return True if `node` is guarded in its function, or that function at each of its calls in this file."""
        function = self._program.function_of(node)
        if self.rank_guard(node) is not None or any(map(self._is_for_one_writer, self._conditions(node, function))):
            return True
        if self.is_decorated(function):
            return True
        sites = self._program.call_sites(function)
        return bool(sites) and depth > 0 and all(self.runs_on_some_ranks(site, depth - 1) for site in sites)

    def _conditions(self, node: ast.AST, function: ast.AST) -> Iterator[ast.expr]:
        """Yield the conditions around `node`, and of those before it at which its function returns."""
        yield from (each.test for each in self._program.ancestors(node) if isinstance(each, (ast.If, ast.IfExp)))
        for each in self._program.inside(function, ast.If):
            if isinstance(each, ast.If) and each.lineno < node.lineno and isinstance(each.body[-1], ast.Return):  # type: ignore[attr-defined]
                yield each.test

    def _is_for_one_writer(self, test: ast.expr) -> bool:
        return _ONE_WRITER.search(ast.unparse(test)) is not None

    def is_decorated(self, function: ast.AST) -> bool:
        """Return True if a decorator such as ``rank_zero_only`` lets only some ranks run `function`."""
        texts = [ast.unparse(each) for each in getattr(function, "decorator_list", ())]
        return any(word in text for text in texts for word in ("rank_zero", "main_process", "rank0", "master"))


def _is_handler(parent: ast.AST, name: str) -> bool:
    if isinstance(parent, ast.ExceptHandler):
        return not catches_data_end(parent)
    return isinstance(parent, ast.Try) and name == "finalbody"


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _test_of(node: ast.AST) -> list[ast.expr]:
    return [node.test] if isinstance(node, ast.If) else []


def _asks_for_a_rank(test: ast.Compare) -> bool:
    """True if a comparison only asks whether the program runs in ranks: with None or -1, or `in os.environ`."""
    right = test.comparators[0]
    if isinstance(test.ops[0], (ast.In, ast.NotIn)):
        return "environ" in ast.unparse(right)
    is_minus_one = isinstance(right, ast.UnaryOp) and is_constant(right.operand, 1)
    is_sign = isinstance(test.ops[0], (ast.GtE, ast.Lt)) and is_constant(right, 0)
    return is_minus_one or is_sign or is_constant(right, None)


P2P = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"})
COLLECTIVES = frozenset(
    {
        "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
        "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list",
        "gather", "gather_object", "monitored_barrier", "new_group", "new_subgroups", "reduce", "reduce_scatter",
        "reduce_scatter_tensor", "scatter", "scatter_object_list"
    }
)  # fmt: skip
_LIBRARY_COLLECTIVES = frozenset(
    {"gather", "gather_for_metrics", "reduce", "wait_for_everyone", "pad_across_processes", "all_gather", "all_reduce",
     "barrier", "broadcast"}
)  # fmt: skip
_LIBRARY_OBJECTS = ("accelerate.Accelerator", "lightning.Fabric", "lightning.fabric.Fabric", "lightning_fabric.Fabric")


def collective_of(program: Program, call: ast.Call) -> str:
    """Return the name of the collective that `call` is, on the default group; empty if it is not one.

    Calls with a group are left out: that only its members make them is right.
    """
    name = program.name_of(call)
    module, _, last = name.rpartition(".")
    if module in ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.nn.functional"):
        group = next((keyword.value for keyword in call.keywords if keyword.arg in ("group", "ranks")), None)
        is_default = group is None or is_constant(group, None) or program.name_of(group).endswith(".WORLD")
        is_default = is_default and not any("group" in ast.unparse(each) for each in call.args)
        return last if last in COLLECTIVES and is_default else ""
    if isinstance(call.func, ast.Attribute) and call.func.attr in _LIBRARY_COLLECTIVES and not name:
        return call.func.attr if program.is_made_by(call.func.value, *_LIBRARY_OBJECTS) else ""
    return ""
