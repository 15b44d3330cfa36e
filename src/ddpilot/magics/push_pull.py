# SPDX-License-Identifier: Apache-2.0
"""`%ddp push`, `%ddp pull` and `%ddp run`: send values between the notebook and the ranks."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Mapping
from keyword import iskeyword
from types import ModuleType
from typing import Any

from ddpilot.errors import LaunchError, RankError, did_you_mean
from ddpilot.findings.text import render_ranks
from ddpilot.magics.parser import MagicUsageError
from ddpilot.magics.shell_session import ShellSession, briefly
from ddpilot.session.arguments import check_expression
from ddpilot.session.protocol.variables import find_companions, user_names
from ddpilot.session.session import Session

SCOPE = "scope"
"""Key of a verb's arguments: the variables that its line can use."""

RETURNED = "--returned"
"""Marks a line of `%ddp` that ddpilot itself generates: its value is used in an expression, such as an assignment."""
_MISSING = re.compile(r"NameError: name '(\w+)' is not defined")


def push_values(shell_session: ShellSession, given: Mapping[str, Any]) -> None:
    """Copy variables of the notebook to ranks."""
    session = shell_session.require("pushing", given.get("ranks"), "--ranks")
    names, here = given["names"], given[SCOPE]
    for name in names:
        if name not in here:
            raise MagicUsageError(
                f"pushing `{name}`",
                found="the notebook has no variable of that name",
                fix=did_you_mean(name, user_names(here)) or "Separate names by blanks: `%ddp push x y`",
            )
    with briefly():
        session.push({name: here[name] for name in names}, ranks=given.get("ranks"))


def pull_values(shell_session: ShellSession, given: Mapping[str, Any]) -> Any:
    """Copy values of ranks into variables of the notebook, and report which variables were overwritten.

    In an expression, such as `x = %ddp pull y`, return the values (one value, or a tuple) and set no variables.
    """
    rank, names = None if given.get("all") else given.get("rank", 0), given["names"]
    session = shell_session.require("pulling", None if rank is None else [rank], "--rank")
    other, is_returned = given.get("other"), given.get("is_returned", False)
    if (other is not None or is_returned) and len(names) > 1 and _is_expression(" ".join(names)):
        names = [" ".join(names)]  # one expression that contains spaces
    if other is not None:
        _check_other(other, names, is_returned)
    elif not is_returned:
        _check_names_to_set(names)
    source = "all ranks, by rank" if rank is None else render_ranks([rank])
    with briefly():
        pulled = session.pull(names, rank=rank)
    values = pulled if rank is not None else [list(each) for each in zip(*pulled, strict=True)]
    if is_returned:
        return values[0] if len(values) == 1 else tuple(values)
    for name, value in zip(names, values, strict=True):
        _bind(shell_session, other or name, value, source)
    return None


def _check_other(other: str, names: list[str], is_returned: bool) -> None:
    if is_returned:
        fix = f"Write `{other} = %ddp pull {names[0]}`, or `%ddp pull {names[0]} --as {other}`"
        raise MagicUsageError("pulling", found=f"`--as {other}` in an expression", fix=fix)
    if len(names) > 1 or not other.isidentifier() or iskeyword(other):
        raise MagicUsageError(
            "pulling", found=f"`--as {other}` for {' '.join(names)}", fix="Give one value, and the name of a variable"
        )


def _check_names_to_set(names: list[str]) -> None:
    for name in names:
        if name == "as":
            fix = f"Did you mean `%ddp pull {' '.join(names).replace(' as ', ' --as ')}`?"
            raise MagicUsageError("pulling", found="`as` is not a variable name", fix=fix)
        if not name.isidentifier():
            check_expression(name)
            fix = f"Give it one: `%ddp pull {name} --as value`"
            raise MagicUsageError("pulling", found=f"`{name}` is not a variable name", fix=fix)


class MarkReturned(ast.NodeTransformer):
    """Marks `%ddp pull` and `%ddp run` in expressions.

    On lines of their own, one sets variables, the other hides Nones.
    """

    def visit_Expr(self, node: ast.Expr) -> ast.AST:  # ast's name
        """Leave a line that consists of the magic alone unchanged."""
        return node if _is_marked(node.value) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:  # ast's name
        """Mark the magic anywhere else."""
        if _is_marked(node):
            verb, _, rest = node.args[1].value.lstrip().partition(" ")  # type: ignore[attr-defined]  # a constant
            node.args[1] = ast.copy_location(ast.Constant(f"{verb} {RETURNED} {rest}"), node.args[1])
        return self.generic_visit(node)


def _is_marked(node: ast.expr) -> bool:
    """True if `node` is IPython's call for a line `%ddp pull ...` or `%ddp run ...`."""
    is_magic = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 2
    if not is_magic or node.func.attr != "run_line_magic":  # type: ignore[attr-defined]
        return False
    name, line = (getattr(arg, "value", None) for arg in node.args)  # type: ignore[attr-defined]
    return name == "ddp" and isinstance(line, str) and line.split()[:1] in (["pull"], ["run"])


def _is_expression(text: str) -> bool:
    try:
        check_expression(text)
    except LaunchError:
        return False
    return True


def _bind(shell_session: ShellSession, name: str, value: object, source: str) -> None:
    namespace = shell_session.shell.user_ns
    was = f"; the notebook's own ({type(namespace[name]).__name__}) was replaced" if name in namespace else ""
    shell_session.shell.push({name: value}, interactive=True)
    shell_session.report(f"`{name}` is now {_describe(value)} from {source}{was}")


def _describe(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shape = getattr(value, "shape", None)
    size = f" of shape {tuple(shape)}" if shape is not None else ""
    if not size and isinstance(value, (list, tuple, dict, set)):
        size = f" of {len(value)}"
    return f"{type(value).__name__}{size}"


def call_on_ranks(shell_session: ShellSession, given: Mapping[str, Any]) -> Any:
    """Call a function of the notebook on every rank, with arguments of the notebook; return the results by rank.

    Returns None if all results are None and the value is not used in an expression, as IPython would display it.
    """
    text = " ".join(given["call"])
    session = shell_session.require(f"running `{text}`")
    call = parse_call(text)
    _check_names(call, given[SCOPE], session)
    fn, args, kwargs = evaluate_call(call, given[SCOPE])
    with briefly():
        results = session.run(fn, *args, **kwargs)
    is_empty = all(result is None for result in results)
    return None if is_empty and not given.get("is_returned") else results


def _check_names(call: ast.Call, names: Mapping[str, Any], session: Session) -> None:
    """Raise MagicUsageError if a name in `call` is not defined in the notebook."""
    inside = list(ast.walk(call))
    given = {node.arg for node in inside if isinstance(node, ast.arg)}  # parameters of lambdas
    given |= {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in inside:
        if not isinstance(node, ast.Name) or node.id in names or node.id in given or hasattr(builtins, node.id):
            continue
        on_ranks = is_on_a_rank(node.id, session)
        near = did_you_mean(node.id, user_names(names))
        near = near or "`%ddp run` takes function and arguments from the notebook: define it there"
        raise MagicUsageError(
            f"running `{ast.unparse(call)}`",
            found=f"`{node.id}` is {'on the ranks, not' if on_ranks else 'not'} in the notebook",
            fix="Call it in `%%ddp`" if on_ranks else near,
        )


def evaluate_call(call: ast.Call, names: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return the function that `call` calls, and its arguments, from variables; the function is not called."""

    def evaluate(node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), "<%ddp run>", "eval"), names)

    args: list[Any] = []
    for arg in call.args:
        if isinstance(arg, ast.Starred):
            args += evaluate(arg.value)
        else:
            args.append(evaluate(arg))
    kwargs: dict[str, Any] = {}
    for keyword in call.keywords:
        value = evaluate(keyword.value)
        kwargs.update(value if keyword.arg is None else {keyword.arg: value})
    return evaluate(call.func), args, kwargs


def find_function(shell_session: ShellSession, given: Mapping[str, Any], doing: str = "verifying") -> Any:
    """Return the function ``given["name"]`` of the notebook, else of rank 0.

    Raises MagicUsageError if neither has it; the message begins with `doing`.
    """
    name, here = given["name"], given[SCOPE]
    session = shell_session.session
    if name in here:
        found = here[name]
    elif session is not None and is_on_a_rank(name, session):
        with briefly():
            found = session.pull([name], rank=0)[0]
    else:
        fix = did_you_mean(name, user_names(here)) or "Define it in a cell"
        where = "neither the notebook nor the ranks have" if session is not None else "the notebook does not have"
        raise MagicUsageError(f"{doing} `{name}`", found=f"{where} a function of that name", fix=fix)
    if not callable(found):
        fix = "Give the name of a function without arguments, which trains"
        raise MagicUsageError(f"{doing} `{name}`", found=f"`{name}` is {type(found).__name__}", fix=fix)
    return found


def parse_call(text: str, example: str = "%ddp run train(model, epochs=3)") -> ast.Call:
    """Parse the text of a call. Raises MagicUsageError, with the `example`, if it is not one."""
    try:
        parsed = ast.parse(text, mode="eval").body
    except SyntaxError:
        parsed = None
    if not isinstance(parsed, ast.Call):
        raise MagicUsageError("running a function", found=f"`{text}`", fix=f"Write a call: `{example}`")
    return parsed


class NameHints:
    """Adds a fix to NameErrors of ranks and of the notebook's cells if the other side has the name."""

    def __init__(self, shell_session: ShellSession) -> None:
        self._shell_session = shell_session

    def advise(self, error: RankError | LaunchError) -> None:
        """Set the fix of `error` if a rank raised a NameError for a name that the notebook has."""
        missing = _MISSING.search(error.found)
        if missing is None or error.fix:
            return
        error.fix = self._fix(missing[1])
        error.args = (error.render(),)

    def _fix(self, name: str) -> str:
        shell = self._shell_session.shell
        if name not in shell.user_ns or name in shell.user_ns_hidden:
            return ""
        value = shell.user_ns[name]
        if isinstance(value, ModuleType):
            whole = f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")
            return f"`{name}` is imported in the notebook: run `{whole}` in a `%%ddp` cell too"
        here = ", or run this cell in the notebook with `%%ddp --local`" if self._shell_session.is_auto else ""
        hidden = shell.user_ns_hidden
        visible = {each: other for each, other in shell.user_ns.items() if each not in hidden and each[0] != "_"}
        names = find_companions(name, {**visible, name: value})
        if names is None:
            return f"The notebook has `{name}` without the model that it trains: create both on the ranks"
        them = "it" if len(names) == 1 else "both" if len(names) == 2 else "all"
        return f"The notebook has `{name}`: `%ddp push {' '.join(names)}` copies {them} to the ranks{here}"

    def after_cell(self, result: Any) -> None:
        """Callback for IPython's "post_run_cell": print a hint if the cell lacked a name that the ranks have."""
        error, session = result.error_in_exec, self._shell_session.session
        name = getattr(error, "name", None) if isinstance(error, NameError) else None
        if (
            session is not None
            and name
            and name not in self._shell_session.shell.user_ns
            and is_on_a_rank(name, session)
        ):
            self._shell_session.report(
                f"`{name}` is on the ranks: use it in a `%%ddp` cell, or copy it with `%ddp pull {name}`"
            )


def is_on_a_rank(name: str, session: Session) -> bool:
    """True if the lowest live rank has a variable `name`; also False if the ranks are busy."""
    try:
        return any(session.pull(f"{name!r} in globals()", rank=rank) for rank in sorted(session.pids())[:1])
    except (LaunchError, RankError):  # for example, the ranks are busy
        return False
