# SPDX-License-Identifier: Apache-2.0
"""Values between the notebook and the ranks: `%ddp push`, `%ddp pull`, `%ddp run`."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping
from keyword import iskeyword
from typing import Any

from ddpilot.errors import LaunchError, RankError
from ddpilot.findings.words import render_ranks
from ddpilot.magics.desk import Desk, briefly
from ddpilot.magics.usage import MagicUsageError, suggest
from ddpilot.session.arguments import check_expression
from ddpilot.session.session import Session


def push_values(desk: Desk, given: Mapping[str, Any]) -> None:
    """Copy variables of the notebook to ranks."""
    session, names = desk.need("pushing"), given["names"]
    for name in names:
        if name not in desk.shell.user_ns:
            raise MagicUsageError(
                f"pushing `{name}`",
                found="the notebook has no variable of that name",
                fix=suggest(name, desk.shell.user_ns) or "Names of variables stand apart: `%ddp push x y`",
            )
    with briefly():
        session.push({name: desk.shell.user_ns[name] for name in names}, ranks=given.get("ranks"))


def pull_values(desk: Desk, given: Mapping[str, Any]) -> None:
    """Copy values of ranks into variables of the notebook; says what it overwrites."""
    session, names = desk.need("pulling"), given["names"]
    other = given.get("other")
    if other is not None and len(names) > 1 and _is_expression(" ".join(names)):
        names = [" ".join(names)]  # one with spaces in it
    if other is not None and (len(names) > 1 or not other.isidentifier() or iskeyword(other)):
        raise MagicUsageError(
            "pulling", found=f"`--as {other}` for {' '.join(names)}", fix="Give one value, and the name of a variable"
        )
    for name in names:
        if other is None and not name.isidentifier():
            check_expression(name)
            fix = f"Give it one: `%ddp pull {name} --as value`"
            raise MagicUsageError("pulling", found=f"`{name}` is no name of a variable", fix=fix)
    rank = None if given.get("all") else given.get("rank", 0)
    source = "all ranks, by rank" if rank is None else render_ranks([rank])
    for name in names:
        with briefly():
            value = session.pull(name, rank=rank)
        _bind(desk, other or name, value, source)


def _is_expression(text: str) -> bool:
    try:
        check_expression(text)
    except LaunchError:
        return False
    return True


def _bind(desk: Desk, name: str, value: object, source: str) -> None:
    namespace = desk.shell.user_ns
    was = f"; the notebook's own ({type(namespace[name]).__name__}) was replaced" if name in namespace else ""
    desk.shell.push({name: value}, interactive=True)
    desk.say(f"`{name}` is now {_describe(value)} from {source}{was}")


def _describe(value: object) -> str:
    shape = getattr(value, "shape", None)
    size = f" of shape {tuple(shape)}" if shape is not None else ""
    if not size and isinstance(value, (list, tuple, dict, set)):
        size = f" of {len(value)}"
    return f"{type(value).__name__}{size}"


def call_on_ranks(desk: Desk, given: Mapping[str, Any]) -> Any:
    """What the call returns on each rank; function and arguments are the notebook's."""
    text = " ".join(given["call"])
    session = desk.need(f"running `{text}`")
    call = _parse_call(text)
    _check_names(call, desk.shell.user_ns, session)
    fn, args, kwargs = _evaluate(call, desk.shell.user_ns)
    with briefly():
        return session.run(fn, *args, **kwargs)


def _check_names(call: ast.Call, names: Mapping[str, Any], session: Session) -> None:
    """Raise where a name in `call` is not one of the notebook's."""
    inside = list(ast.walk(call))
    given = {node.arg for node in inside if isinstance(node, ast.arg)}  # of a lambda
    given |= {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in inside:
        if not isinstance(node, ast.Name) or node.id in names or node.id in given or hasattr(builtins, node.id):
            continue
        on_ranks = _is_on_a_rank(node.id, session)
        near = suggest(node.id, names) or "`%ddp run` takes function and arguments from the notebook: define it there"
        raise MagicUsageError(
            f"running `{ast.unparse(call)}`",
            found=f"`{node.id}` is {'on the ranks, not' if on_ranks else 'not'} in the notebook",
            fix="Call it in `%%ddp`" if on_ranks else near,
        )


def _is_on_a_rank(name: str, session: Session) -> bool:
    try:
        return any(session.pull(f"{name!r} in globals()", rank=rank) for rank in sorted(session.pids())[:1])
    except (LaunchError, RankError):  # such as ranks that are busy: then it is only said that it is not here
        return False


def _evaluate(call: ast.Call, names: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
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


def _parse_call(text: str) -> ast.Call:
    try:
        parsed = ast.parse(text, mode="eval").body
    except SyntaxError:
        parsed = None
    if not isinstance(parsed, ast.Call):
        raise MagicUsageError(
            "running a function", found=f"`{text}`", fix="Write a call: `%ddp run train(model, epochs=3)`"
        )
    return parsed
