# SPDX-License-Identifier: Apache-2.0
"""Numbers that are averaged or shown."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpilot.lint.program import argument
from ddpilot.lint.rule import Facts, Report, rule
from ddpilot.lint.scopes import Loop

_MAKERS = ("torch.tensor", "torch.as_tensor", "torch.FloatTensor")
_PRINTS = ("print", "tqdm.tqdm.write", "tqdm.auto.tqdm.write", "sys.stdout.write", "pprint.pprint")
_COUNT_METHODS = frozenset({"size", "numel", "sum", "count_nonzero"})


@rule("DDP406")
def mean_of_means(facts: Facts) -> Iterator[Report]:
    """A quotient by this rank's own count is averaged over ranks."""
    for name, call in facts.collectives:
        value = argument(call, 0, "tensor") if name == "all_reduce" else argument(call, 1, "tensor")
        is_gathered = name in ("all_gather", "all_gather_into_tensor") and _is_averaged(facts, call)
        is_reduced = name == "all_reduce" and value is not None and _averages(facts, call, value)
        if value is None or not (is_reduced or is_gathered):
            continue
        quotients = [each for one in _values(facts, value) for each in _quotients(one)]
        if any(_is_own_count(facts, each.right) for each in quotients):
            yield Report(call, "means of unequal numbers of samples are averaged: reduce sum and count, then divide")


def _values(facts: Facts, value: ast.expr) -> Iterator[ast.AST]:
    """Yield what a tensor may be, and what it is made from by `torch.tensor`."""
    for each in facts.program.trace(value):
        yield each
        if isinstance(each, ast.Call) and each.args and facts.program.name_of(each) in _MAKERS:
            yield from facts.program.trace(each.args[0])


def _quotients(node: ast.AST) -> Iterator[ast.BinOp]:
    is_statement = isinstance(node, (ast.FunctionDef, ast.ClassDef))
    for each in [] if is_statement else ast.walk(node):
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div):
            yield each


def _averages(facts: Facts, call: ast.Call, value: ast.expr) -> bool:
    """True if the reduction is AVG, or what was reduced is divided by the number of ranks."""
    op = argument(call, 1, "op")
    if op is not None and facts.program.name_of(op).endswith("ReduceOp.AVG"):
        return True
    text = ast.unparse(value)
    function = facts.program.function_of(call)
    for node in facts.program.inside(function, ast.AugAssign, ast.BinOp):
        if isinstance(node, (ast.AugAssign, ast.BinOp)) and isinstance(node.op, ast.Div) and node.lineno > call.lineno:
            left, right = (node.target, node.value) if isinstance(node, ast.AugAssign) else (node.left, node.right)
            names = {ast.unparse(each) for each in ast.walk(left)}
            if text in names and "world_size" in ast.unparse(right).lower():
                return True
    return False


def _is_averaged(facts: Facts, call: ast.Call) -> bool:
    """True if the mean is taken of what a gather has filled."""
    filled = ast.unparse(call.args[0]) if call.args else ""
    for each in facts.program.inside(facts.program.function_of(call), ast.Call):
        is_mean = isinstance(each, ast.Call) and getattr(each.func, "attr", "") == "mean" and each.lineno > call.lineno
        if is_mean and filled in {ast.unparse(part) for part in ast.walk(each)}:
            return True
    return False


def _is_own_count(facts: Facts, node: ast.expr) -> bool:
    """True if `node` is a number of samples that this rank has counted up or summed."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("sum", "count_nonzero"):
        return True
    if isinstance(node, ast.Attribute):
        return re.search("count|total|num", node.attr) is not None and facts.program.is_added_to(node)
    if not isinstance(node, ast.Name):
        return False
    bindings = facts.program.bindings(node)
    return any(b.kind == "update" and b.value is not None and _counts(b.value) for b in bindings)


def _counts(value: ast.AST) -> bool:
    calls = [each for each in ast.walk(value) if isinstance(each, ast.Call)]
    names = {getattr(each.func, "attr", getattr(each.func, "id", "")) for each in calls}
    has_shape = any(isinstance(each, ast.Attribute) and each.attr == "shape" for each in ast.walk(value))
    return bool(names & {*_COUNT_METHODS, "len"}) or has_shape


@rule("DDP411")
def printed_on_all_ranks(facts: Facts) -> Iterator[Report]:
    """Every rank prints in each step, its own loss among it."""
    for loop in facts.step_loops if facts.wraps else ():
        if facts.trains_ddp(loop):
            yield from prints_of_own_loss(facts, loop)


def prints_of_own_loss(facts: Facts, loop: Loop) -> Iterator[Report]:
    """Report the calls in a loop by which every rank prints its own loss."""
    program = facts.program
    if "builtin" in program.text or "def print" in program.text:
        return
    for call in program.inside(loop, ast.Call):
        assert isinstance(call, ast.Call)
        is_forced = any(keyword.arg == "force" for keyword in call.keywords)  # `print` is a function of its own
        if program.name_of(call) not in _PRINTS or is_forced or facts.flow.runs_on_some_ranks(call):
            continue
        walked = [each for argument in call.args for each in ast.walk(argument)]
        parts = [each for each in walked if isinstance(each, (ast.Name, ast.Attribute, ast.Call))]
        is_loss = ".item()" in ast.unparse(call) or any(_holds_number(facts, each, loop) for each in parts)
        if is_loss and not any(map(facts.flow.differs, parts)) and not _is_reduced(facts, call):
            yield Report(call, "every rank prints its own loss in each step: print on rank 0, or reduce it first")


def _holds_number(facts: Facts, node: ast.expr, loop: Loop) -> bool:
    """True for a variable that is `loss.item()`, and for a list to which the loop appends it."""
    if not isinstance(node, ast.Name):
        return False
    bindings = facts.program.bindings(node)
    if any(each.kind == "value" and each.value is not None and _is_loss_item(each.value) for each in bindings):
        return True
    appends = [call for call in facts.program.inside(loop, ast.Call) if isinstance(call, ast.Call) and call.args]
    return any(
        ast.unparse(call.func) == f"{node.id}.append" and _is_loss_item(call.args[0]) for call in appends
    )  # fmt: skip


def _is_loss_item(node: ast.AST) -> bool:
    text = ast.unparse(node) if isinstance(node, ast.expr) else ""
    return ".item()" in text and "loss" in text and isinstance(node, (ast.Call, ast.BinOp))


def _is_reduced(facts: Facts, call: ast.Call) -> bool:
    """True if what is printed was reduced before."""
    printed = {each.id for each in ast.walk(call) if isinstance(each, ast.Name)}
    return any(isinstance(e, ast.Name) and e.id in printed for _, c in facts.collectives for e in ast.walk(c))
