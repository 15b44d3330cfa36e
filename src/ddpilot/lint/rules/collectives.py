# SPDX-License-Identifier: Apache-2.0
"""Collectives and DDP forwards that only some ranks run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from ddpilot.lint.program import argument
from ddpilot.lint.rank_flow import Guard, RankFlow
from ddpilot.lint.rule import Facts, Report, rule
from ddpilot.lint.scopes import Loop
from ddpilot.source.control_flow import catches_data_end, is_exit, walk_loop

_ROOTS = {"broadcast": (1, "src"), "broadcast_object_list": (1, "src"), "reduce": (1, "dst"), "gather": (2, "dst"),
          "scatter": (2, "src")}  # fmt: skip
"""Collectives with a root: position and name of the argument."""
_OF_ONE_TENSOR = {"abs", "cpu", "detach", "double", "float", "item", "mean", "pow", "sqrt", "square", "sum"}
"""Methods and functions whose result depends on this rank's tensor alone."""
_LEAVE_AS_IT_IS = _OF_ONE_TENSOR | {
    "add_scalar",
    "append",
    "backward",
    "info",
    "isfinite",
    "isnan",
    "print",
    "scale",
    "str",
}
"""Functions that do not change a loss that they are given; any other one may all_reduce it."""
_HAVE_BUFFERS = ("BatchNorm", "register_buffer", "torchvision.models", "resnet", "efficientnet", "mobilenet")


@rule("DDP220")
def guarded_collective(facts: Facts) -> Iterator[Report]:
    """A collective, or a call of a function with one, under a condition on the rank."""
    for name, call, guard in _guarded_collectives(facts):
        if guard.kind == "condition" and not _is_paired(facts, name, call, guard):
            yield Report(call, f"`{name}` is called only on ranks where {_text(guard)}; the other ranks never join it")


@rule("DDP208")
def collective_after_exit(facts: Facts) -> Iterator[Report]:
    """A collective after a `return`, `break` or `continue` that only some ranks take."""
    for name, call, guard in _guarded_collectives(facts):
        if guard.kind == "exit":
            yield Report(
                call, f"`{name}` is not reached by ranks that left at line {_line(guard.node)} ({_text(guard)})"
            )
    for call in facts.forwards if facts.step_loops else ():
        exits = facts.flow.rank_guard(call)
        if exits is not None and exits.kind == "exit" and (_trains(facts, call) or _may_have_buffers(facts, call)):
            yield Report(
                call, f"the DDP forward is not reached by ranks that left at line {_line(exits.node)} ({_text(exits)})"
            )


@rule("DDP208")
def loop_left_on_some_ranks(facts: Facts) -> Iterator[Report]:
    """A `break` or `return` that only some ranks take, at the end of a loop with collectives or DDP forwards."""
    named = {call: f"`{name}`" for name, call in facts.collectives}
    named.update((call, "the DDP forward") for call in facts.forwards if _trains(facts, call))
    for loop in _loops_around(facts, named):
        calls = [call for call in named if loop in facts.program.loops_of(call)]
        calls = calls or [call for call in facts.program.calls_inside(loop) if call in named]
        for node, tests in walk_loop(loop):
            if not isinstance(node, (ast.Break, ast.Return)) or not any(map(facts.flow.differs, tests)):
                continue
            lines = [_line_within(facts, call, loop) for call in calls]
            if calls and all(line < node.lineno for line in lines):
                test = next(filter(facts.flow.differs, tests))
                text = f"ranks where `{ast.unparse(test)[:50]}` leave the loop, and the others call"
                yield Report(node, f"{text} {named[calls[0]]} in its next iteration")


@rule("DDP208")
def loop_left_by_own_loss(facts: Facts) -> Iterator[Report]:
    """A `break` or `return` in a loop with DDP steps whose condition is the loss of one rank."""
    steps = [call for call in facts.forwards if _trains(facts, call)]
    for loop in _loops_around(facts, steps):
        lines = [_line_within(facts, call, loop) for call in steps if call in {*facts.program.calls_inside(loop)}]
        for node, tests in walk_loop(loop):
            if not isinstance(node, (ast.Break, ast.Return)) or any(map(facts.flow.differs, tests)):
                continue
            own = next((test for test in tests if _compares_own_loss(facts, test)), None)
            if own is not None and lines and max(lines) < node.lineno:
                text = f"`{ast.unparse(own)[:50]}` is decided by each rank's own loss: a rank that leaves alone"
                yield Report(node, f"{text} is missing in the next backward of the others; all_reduce the loss first")


def _compares_own_loss(facts: Facts, test: ast.expr) -> bool:
    """True if `test` compares a loss of this rank's samples that nothing in the file may have reduced."""
    sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) else []
    return any(_is_own_loss(facts, side) for side in sides) and _ranks_have_own_samples(facts, sides)


def _is_own_loss(facts: Facts, node: ast.AST, depth: int = 6) -> bool:
    """True if `node` is computed from the output of a DDP forward, and by functions of one tensor only."""
    if isinstance(node, ast.BinOp):
        return any(_is_own_loss(facts, each, depth) for each in (node.left, node.right))
    if isinstance(node, ast.Name):
        bindings = facts.program.bindings(node)
        is_pure = all(each.kind == "value" and each.index is None and each.value is not None for each in bindings)
        if not (bindings and is_pure and depth) or _may_be_reduced(facts, node.id):
            return False
        return all(_is_own_loss(facts, each.value, depth - 1) for each in bindings if each.value is not None)
    if not isinstance(node, ast.Call) or node in facts.forwards:
        return node in facts.forwards
    name = facts.program.name_of(node)
    is_loss = name.startswith("torch.nn.functional.") or any(
        made.startswith("torch.nn.") and made.endswith("Loss") for made, _ in facts.program.made_by(node.func)
    )
    if is_loss or name in _OF_ONE_TENSOR or getattr(node.func, "id", "") in _OF_ONE_TENSOR:
        return any(_is_own_loss(facts, each, depth) for each in node.args)
    is_method = isinstance(node.func, ast.Attribute) and node.func.attr in _OF_ONE_TENSOR
    return is_method and _is_own_loss(facts, node.func.value, depth)  # type: ignore[attr-defined]


def _may_be_reduced(facts: Facts, name: str) -> bool:
    """True if a variable is passed to a function that may change it in place."""
    for call in facts.program.nodes[ast.Call]:
        assert isinstance(call, ast.Call)
        passed = [each.id for given in call.args for each in ast.walk(given) if isinstance(each, ast.Name)]
        called = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name in passed and called not in _LEAVE_AS_IT_IS:
            return True
    return False


def _ranks_have_own_samples(facts: Facts, sides: Sequence[ast.expr]) -> bool:
    """True if the file divides its data between ranks; else the losses may be equal on all ranks."""
    names = [each for side in sides for each in ast.walk(side) if isinstance(each, ast.Name)]
    values = [value for name in names for value in facts.program.trace(name)]
    return bool(facts.program.calls_to("DistributedSampler")) or any(
        facts.flow.differs(each) for value in values for each in ast.walk(value) if isinstance(each, ast.Name)
    )


def _loops_around(facts: Facts, calls: Iterable[ast.Call]) -> Iterator[Loop]:
    """Yield the loops around `calls`, or around calls of the functions of this file that make them, each once."""
    done: set[ast.AST] = set()
    for call in calls:
        function = facts.program.function_of(call)
        for site in [call, *facts.program.call_sites(function)]:
            for loop in facts.program.loops_of(site):
                if loop not in done:
                    done.add(loop)
                    yield loop


def _line_within(facts: Facts, call: ast.Call, loop: Loop) -> int:
    """Return the line in `loop` at which `call` is made: its own, or that of a call of the function around it."""
    if loop in facts.program.loops_of(call):
        return call.lineno
    sites = facts.program.call_sites(facts.program.function_of(call))
    return max((each.lineno for each in sites if loop in facts.program.loops_of(each)), default=loop.lineno)


@rule("DDP205")
def root_of_each_rank(facts: Facts) -> Iterator[Report]:
    """A collective whose `src` or `dst` is this rank, and so a different root on each."""
    for name, call in facts.collectives:
        at = _ROOTS.get(name)
        root = argument(call, at[0], at[1]) if at is not None else None
        if root is not None and not isinstance(root, ast.Constant) and _is_own_rank(facts, root):
            yield Report(call, f"each rank names itself as the root of `{name}`: pass the same rank everywhere")


def _is_own_rank(facts: Facts, node: ast.expr) -> bool:
    """True for this process's rank itself: its name, or `get_rank()`."""
    traced = [each for each in facts.program.trace(node) if isinstance(each, (ast.Name, ast.Attribute, ast.Call))]
    is_read = any(facts.program.name_of(each) == "torch.distributed.get_rank" for each in traced)
    values = [each.kind == "value" for each in facts.program.bindings(node)] if isinstance(node, ast.Name) else [False]
    return is_read or (all(values) and facts.flow.differs(node))


@rule("DDP210")
def collective_in_handler(facts: Facts) -> Iterator[Report]:
    """A collective in `except` or `finally`, or a step that an error skips on one rank only."""
    for name, call in facts.collectives:
        handler = next((guard for guard in facts.flow.guards(call) if guard.kind == "handler"), None)
        if handler is not None and not _replaces_another(facts, handler.node, name):
            where = "except" if isinstance(handler.node, ast.ExceptHandler) else "finally"
            yield Report(call, f"`{name}` in `{where}`: a rank with an error calls it while the others are elsewhere")
    for loop in facts.step_loops:
        if facts.trains_ddp(loop):
            yield from _skipped_steps(facts, loop)


@rule("DDP211")
def forward_on_some_ranks(facts: Facts) -> Iterator[Report]:
    """A DDP model's forward under a condition on the rank."""
    for call in facts.forwards:
        guard = facts.flow.rank_guard(call)
        has_guard = guard is not None and guard.kind == "condition"
        if has_guard and not _has_other_side(facts, call) and (_trains(facts, call) or _may_have_buffers(facts, call)):
            assert guard is not None
            yield Report(call, f"the DDP forward runs only on ranks where {_text(guard)}; use `.module` there")
    for site, guard in _guarded_sites(facts):
        inside = [each for each in facts.program.calls_inside(site) if each in facts.forwards]
        inside = [each for each in inside if facts.flow.rank_guard(each) is None and _may_have_buffers(facts, each)]
        if inside:
            yield Report(site, f"the DDP forward at line {inside[0].lineno} runs only on ranks where {_text(guard)}")


def _guarded_collectives(facts: Facts) -> Iterator[tuple[str, ast.Call, Guard]]:
    """Yield collectives that only some ranks reach, and calls of functions that contain one."""
    for name, call in facts.collectives:
        guard = facts.flow.rank_guard(call)
        if guard is not None:
            yield name, call, guard
    named = {call: name for name, call in facts.collectives}
    for site, guard in _guarded_sites(facts):
        inner = next((c for c in facts.program.calls_inside(site) if c in named and not _is_local(facts, c)), None)
        if inner is not None:
            yield named[inner], site, guard


def _guarded_sites(facts: Facts) -> Iterator[tuple[ast.Call, Guard]]:
    """Yield the calls of functions of this file that only some ranks make."""
    if not (facts.collectives or facts.forwards):
        return
    for function in [each for some in facts.program.functions.values() for each in some]:
        for site in facts.program.call_sites(function):
            guard = facts.flow.rank_guard(site)
            if guard is not None:
                yield site, guard


def _is_local(facts: Facts, call: ast.Call) -> bool:
    """True if a collective is already reported, or is not run where only one rank is there."""
    return facts.flow.rank_guard(call) is not None


def _is_paired(facts: Facts, name: str, call: ast.Call, guard: Guard) -> bool:
    """True if the other ranks call the same collective: in the other branch, or under the opposite condition nearby."""
    if isinstance(guard.node, ast.If) and any(_calls(facts, each, name) for each in _other_branch(guard)):
        return True
    function = facts.program.function_of(call)
    for other, each, own in _guarded_collectives(facts):
        is_same = other == name and each is not call and facts.program.function_of(each) is function
        if is_same and own.kind == "condition" and _is_negative(facts.flow, own) != _is_negative(facts.flow, guard):
            return True
    return False


def _is_negative(flow: RankFlow, guard: Guard) -> bool:
    """True for conditions such as ``rank != 0``, which rank 0 does not meet."""
    test, is_negative = guard.test, guard.is_else
    if isinstance(test, ast.BoolOp):
        test = next(filter(flow.differs, test.values), test)
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, is_negative = test.operand, not is_negative
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.NotEq, ast.NotIn, ast.Gt)):
        is_negative = not is_negative
    return is_negative


def _other_branch(guard: Guard) -> list[ast.stmt]:
    assert isinstance(guard.node, ast.If)
    return guard.node.body if guard.is_else else guard.node.orelse


def _calls(facts: Facts, statement: ast.AST, name: str) -> bool:
    named = {call: known for known, call in facts.collectives}
    return any(named.get(call) == name for call in facts.program.calls_inside(statement))


def _has_other_side(facts: Facts, call: ast.Call) -> bool:
    guard = facts.flow.rank_guard(call)
    if guard is None or not isinstance(guard.node, ast.If):
        return False
    return any(each in facts.forwards for s in _other_branch(guard) for each in facts.program.calls_inside(s))


def _trains(facts: Facts, call: ast.Call) -> bool:
    """True if a forward is followed by a backward in the same loop or function."""
    around = [*facts.program.loops_of(call)[:1], facts.program.function_of(call)][0]
    return any(getattr(each.func, "attr", "") == "backward" for each in facts.program.calls_inside(around))


def _may_have_buffers(facts: Facts, call: ast.Call) -> bool:
    """True if the file shows buffers of the model: its forward exchanges them, and that of other models nothing."""
    program = facts.program
    wraps = [made for name, made in program.made_by(call.func) if name == "DDP" and made.args]
    classes = [made for wrap in wraps for made in program.instances(wrap.args[0])]
    if any(any(k.arg == "broadcast_buffers" and _is_false(k.value) for k in wrap.keywords) for wrap in wraps):
        return False
    if wraps and all(_is_unknown(facts, wrap.args[0]) for wrap in wraps):
        return True
    texts = [ast.unparse(each) for each in [*classes, *(wrap.args[0] for wrap in wraps)]]
    texts += [name for wrap in wraps for name, _ in program.made_by(wrap.args[0])]
    return any(word in text for text in texts for word in _HAVE_BUFFERS)


def _is_unknown(facts: Facts, model: ast.expr) -> bool:
    """True if the file does not show how a model is made: it is passed by the caller."""
    kinds = (ast.Name, ast.Attribute, ast.Constant)
    return all(isinstance(each, kinds) or _moves(each) for each in facts.program.trace(model))


def _moves(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("to", "cuda", "train")


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _replaces_another(facts: Facts, handler: ast.AST, name: str) -> bool:
    """True if a `try` calls a different collective, which its handler replaces, or is that of a context manager."""
    block = facts.program.parents[handler] if isinstance(handler, ast.ExceptHandler) else handler
    if isinstance(block, ast.Try) and any(isinstance(e, ast.Yield) for s in block.body for e in ast.walk(s)):
        return True
    if block is handler or isinstance(getattr(handler, "body", [None])[-1], ast.Raise):
        return False
    named = {call: each for each, call in facts.collectives if each != name}
    return isinstance(block, ast.Try) and any(c in named for s in block.body for c in facts.program.calls_inside(s))


def _skipped_steps(facts: Facts, loop: Loop) -> Iterator[Report]:
    program = facts.program
    for node in program.inside(loop, ast.Try):
        assert isinstance(node, ast.Try)
        has_step = any(_is_step(facts, call) for each in node.body for call in program.calls_inside(each))
        for handler in node.handlers if has_step else ():
            if not _is_of_all_ranks(handler) and not _ends(handler.body):
                yield Report(handler, "an error on one rank skips a DDP step that the other ranks take; they then hang")
    for node, tests in walk_loop(loop):
        if isinstance(node, (ast.Continue, ast.Break)) and tests and not any(map(facts.flow.differs, tests)):
            follows = [c for c in program.inside(loop, ast.Call) if isinstance(c, ast.Call) and c.lineno > node.lineno]
            if any(_is_step(facts, call) for call in follows) and _asks_own_loss(facts, tests[-1]):
                yield Report(node, f"`{ast.unparse(tests[-1])}` differs between ranks: some skip a step of the others")


def _is_step(facts: Facts, call: ast.Call) -> bool:
    is_backward = isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
    return is_backward or call in facts.forwards


def _ends(body: Sequence[ast.stmt]) -> bool:
    """True if the statements of a handler always end by raising, returning or ending the program."""
    if any(isinstance(each, (ast.Continue, ast.Break)) for statement in body for each in ast.walk(statement)):
        return False
    last = body[-1]
    if isinstance(last, ast.If):
        return bool(last.orelse) and _ends(last.body) and _ends(last.orelse)
    return isinstance(last, (ast.Raise, ast.Return)) or is_exit(last)


def _is_of_all_ranks(handler: ast.ExceptHandler) -> bool:
    """True for the end of an iterator, and for an interrupt, which reaches all ranks."""
    return catches_data_end(handler) or getattr(handler.type, "id", "") == "KeyboardInterrupt"


def _asks_own_loss(facts: Facts, test: ast.expr) -> bool:
    """True if `test` asks whether a value of this rank is finite or large, and no collective has reduced the value."""
    program = facts.program
    asked = [
        call
        for call in ast.walk(test)
        if isinstance(call, ast.Call)
        and getattr(call.func, "attr", getattr(call.func, "id", "")) in ("isnan", "isinf", "isfinite", "item")
    ]
    names = {each.id for call in asked for each in ast.walk(call) if isinstance(each, ast.Name)}
    names -= {each.id for each in ast.walk(test) if isinstance(each, ast.Name) and program.name_of(each)}
    if not asked or not any("loss" in name for name in names):
        return False
    reduced = {each.id for _, call in facts.collectives for each in ast.walk(call) if isinstance(each, ast.Name)}
    values = [b.value for n in ast.walk(test) if isinstance(n, ast.Name) for b in program.bindings(n) if b.value]
    reduced_by_call = any("reduce" in ast.unparse(value) or "gather" in ast.unparse(value) for value in values)
    return not names & reduced and not reduced_by_call


def _text(guard: Guard) -> str:
    text = ast.unparse(guard.test) if guard.test is not None else ""
    text = text if len(text) <= 50 else f"{text[:47]}..."
    return f"not `{text}`" if guard.is_else else f"`{text}`"


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)
