# SPDX-License-Identifier: Apache-2.0
"""Find loops over sets, whose order differs between processes: each process seeds the hash of strings randomly."""

from __future__ import annotations

import ast

from ddpilot.source.parsed_file import Source, Sources
from ddpilot.watch.explain.text import show_file
from ddpilot.watch.snapshot.stacks import Chain

UNORDERED_FIX = "go over `sorted(...)` of it, or over a list or a dict that all ranks fill in the same order"

_SETS = ("set", "frozenset")
_KEEP_ORDER = ("list", "tuple", "iter", "enumerate", "zip", "map", "filter", "reversed", "dict", "fromkeys", "tqdm")
_OF_SETS = ("union", "intersection", "difference", "symmetric_difference")
_VIEWS = ("keys", "items", "values", "copy")
_DEPTH = 6
"""Maximum number of names and calls through which a set is followed."""


def say_unordered(one: Chain, other: Chain, sources: Sources) -> str:
    """Return a sentence if both call chains are at one line in a loop over a set; empty otherwise.

    For one of them only its line may be known.
    """
    num_common = min(len(one), len(other))
    ends = [[(frame.file, frame.line) for frame in chain[len(chain) - num_common :]] for chain in (one, other)]
    if not num_common or ends[0] != ends[1]:
        return ""
    for frame in reversed(max(one, other, key=len)):
        source = sources.find(frame)
        line = _find_loop(source, frame.line) if source is not None else None
        if source is not None and line is not None:
            spot = f"`{source.text(line)}` ({show_file(frame.file)}:{line})"
            return (
                f"{spot} goes over a set, which has another order in each process: the ranks are at different entries"
            )
    return ""


def _find_loop(source: Source, line: int) -> int | None:
    """Return the line of the innermost loop around `line` that iterates in no defined order."""
    heads = (block.node for block in reversed(source.blocks(line)) if isinstance(block.node, ast.For))
    return next((head.lineno for head in heads if _has_no_order(source, head.iter, _DEPTH)), None)


def _has_no_order(source: Source, value: ast.expr, depth: int) -> bool:
    """True if `value` is a set, or takes its order from one."""
    if not depth:
        return False
    if isinstance(value, (ast.Set, ast.SetComp)):
        return True
    if isinstance(value, (ast.ListComp, ast.DictComp, ast.GeneratorExp)):
        return any(_has_no_order(source, each.iter, depth - 1) for each in value.generators)
    if isinstance(value, ast.BinOp):
        return any(_is_keys(side) or _has_no_order(source, side, depth - 1) for side in (value.left, value.right))
    if isinstance(value, ast.Call):
        return _gives_no_order(source, value, depth - 1)
    if isinstance(value, (ast.Name, ast.Attribute)):
        return any(_has_no_order(source, each, depth - 1) for each in source.values_of(value))
    return False


def _gives_no_order(source: Source, call: ast.Call, depth: int) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in _SETS or (name in _OF_SETS and owner is not None):
        return True
    if name in _VIEWS and owner is not None:
        return _has_no_order(source, owner, depth)
    return name in _KEEP_ORDER and any(_has_no_order(source, each, depth) for each in call.args)


def _is_keys(value: ast.expr) -> bool:
    """True for ``d.keys()``: an operator on the keys of two dicts gives a set."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "keys"
