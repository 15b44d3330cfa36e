# SPDX-License-Identifier: Apache-2.0
"""Processes that a program spawns or forks, and where it uses CUDA."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpilot.lint.program import Program, argument, is_constant
from ddpilot.lint.rule import Facts, Report, rule

_SPAWNS = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
_PROCESSES = ("torch.multiprocessing.Process", "multiprocessing.Process")
_POOLS = (
    "torch.multiprocessing.Pool",
    "multiprocessing.Pool",
    "multiprocessing.pool.Pool",
    "concurrent.futures.ProcessPoolExecutor",
    "concurrent.futures.process.ProcessPoolExecutor",
)
_ELASTIC = ("torch.distributed.launcher.api.elastic_launch", "torch.distributed.launcher.elastic_launch")
_NOTEBOOK_LAUNCHERS = ("accelerate.notebook_launcher", "accelerate.launchers.notebook_launcher")
STARTERS = (*_SPAWNS, *_PROCESSES, *_POOLS, *_ELASTIC, *_NOTEBOOK_LAUNCHERS, "os.fork", ".Process", ".Pool")
"""Calls that start processes; the function around them is that of the launching process."""
_ASKS_CUDA = ("is_available", "device_count", "is_initialized", "is_bf16_supported", "_is_in_bad_fork")
"""Functions of `torch.cuda` that leave it uninitialized, so that processes can be forked afterwards."""
_DEFERRED = ("manual_seed", "manual_seed_all")


@rule("DDP111")
def no_main_guard(facts: Facts) -> Iterator[Report]:
    """Processes are spawned at the top level of a script, without a main guard."""
    program = facts.program
    for call in [] if program.cells else program.calls_to(*_SPAWNS, *_PROCESSES, ".Process"):
        method = argument(call, 5, "start_method")
        is_spawn = program.name_of(call) in _SPAWNS or "set_start_method" in program.text or _is_of_spawn(facts, call)
        if is_spawn and _runs_on_import(program, call) and not is_constant(method, "fork"):
            yield Report(call, "spawned ranks import this file and start ranks again: put it under a main guard")


def _runs_on_import(program: Program, node: ast.AST, depth: int = 3) -> bool:
    """True if `node` is run without any condition when the file is imported, directly or through its functions."""
    if any(isinstance(each, (ast.If, ast.IfExp, ast.Lambda, ast.ClassDef)) for each in program.ancestors(node)):
        return False
    function = program.function_of(node)
    if function is program.tree:
        return True
    return depth > 0 and any(_runs_on_import(program, site, depth - 1) for site in program.call_sites(function))


def _is_of_spawn(facts: Facts, call: ast.Call) -> bool:
    """True for ``get_context("spawn").Process(...)``."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    made = facts.program.made_by(owner) if owner is not None else []
    return any(
        name.endswith("multiprocessing.get_context") and is_constant(argument(each, 0, "method"), "spawn")
        for name, each in made
    )


@rule("DDP113")
def spawn_unpicklable(facts: Facts) -> Iterator[Report]:
    """A lambda or an inner function is spawned, which cannot be pickled."""
    program = facts.program
    for call in program.calls_to(*_SPAWNS):
        function = argument(call, 0, "fn")
        if function is None or is_constant(argument(call, 5, "start_method"), "fork"):
            continue
        args = argument(call, 1, "args")
        given = [function, *(args.elts if isinstance(args, (ast.Tuple, ast.List)) else ())]
        for each in given:
            traced = [part for one in _partial_of(program, each) for part in program.trace(one)]
            inner = [f for f in traced if isinstance(f, ast.FunctionDef) and program.function_of(f) is not program.tree]
            inner = [f for f in inner if program.class_of(f) is None]
            if any(isinstance(one, ast.Lambda) for one in traced) or inner:
                yield Report(
                    each, "a lambda or inner function cannot be sent to a spawned rank: define it in the module"
                )


def _partial_of(program: Program, node: ast.expr) -> Iterator[ast.expr]:
    """Yield `node`, and what `functools.partial` was given if `node` is made by it."""
    yield node
    for each in program.trace(node):
        if isinstance(each, ast.Call) and program.name_of(each.func) == "functools.partial":
            yield from each.args


@rule("DDP112")
def notebook_spawn(facts: Facts) -> Iterator[Report]:
    """A notebook spawns a function of one of its cells, which the spawned process does not have."""
    program = facts.program
    for call in program.calls_to(*_SPAWNS) if program.cells else ():
        function = argument(call, 0, "fn")
        is_own = function is not None and any(isinstance(each, ast.FunctionDef) for each in program.trace(function))
        if is_own and not is_constant(argument(call, 5, "start_method"), "fork"):
            yield Report(call, "a spawned process does not have what a cell defined: use `ddpilot.launch`")


@rule("DDP114")
def cuda_before_fork(facts: Facts) -> Iterator[Report]:
    """CUDA is used before processes are forked."""
    program = facts.program
    if not program.imports & {"torch", "accelerate"}:
        return
    for call in program.calls_to(*STARTERS):
        if _forks(facts, call) and (use := _cuda_before(program, call)) is not None:
            yield Report(call, f"CUDA was used at line {line_in_cell(program, use)}: forked processes cannot use it")


def _cuda_before(program: Program, call: ast.Call) -> ast.expr | None:
    """Return a use of CUDA before `call` in its function, or when the file is imported."""
    function = program.function_of(call)
    for use in cuda_uses(program):
        is_here = program.function_of(use) in (function, program.tree) and use.lineno < call.lineno
        is_other = program.exclude_each_other(use, call) or _is_main_only(program, use, call)
        if is_here and not is_other and not is_only_named(program, use):
            return use
    return None


def _is_main_only(program: Program, use: ast.AST, call: ast.Call) -> bool:
    """True if `use` is under a condition at the top level, and `call` is in a function."""
    is_choice = any(isinstance(each, (ast.If, ast.IfExp)) for each in program.ancestors(use))
    return program.function_of(call) is not program.tree and program.function_of(use) is program.tree and is_choice


def _forks(facts: Facts, call: ast.Call) -> bool:
    """True if `call` forks processes that use CUDA or are ranks."""
    program, name = facts.program, facts.program.name_of(call)
    if name == "os.fork" or name in _NOTEBOOK_LAUNCHERS:
        return not is_constant(argument(call, 2, "num_processes"), 0, 1)
    if name in _SPAWNS:
        return is_constant(argument(call, 5, "start_method"), "fork")
    if name in _ELASTIC:
        configs = program.made_by(call.args[0]) if call.args else []
        return any(is_constant(argument(made, -1, "start_method"), "fork") for _, made in configs)
    method = _start_method(facts, call)
    return method in ("", "fork") and _may_be_rank(facts, call)


def _start_method(facts: Facts, call: ast.Call) -> str:
    """Return how a process or pool is started; empty for the default, "?" if the file does not show it."""
    program = facts.program
    owner = call.func.value if isinstance(call.func, ast.Attribute) and not program.name_of(call) else None
    context = owner if owner is not None else argument(call, -1, "mp_context") or argument(call, -1, "context")
    if context is not None:
        contexts = [made for name, made in program.made_by(context) if name.endswith("multiprocessing.get_context")]
        method = argument(contexts[0], 0, "method") if contexts else None
        if not contexts or (method is not None and not isinstance(method, ast.Constant)):
            return "?"
        if isinstance(method, ast.Constant):
            return str(method.value)
    chosen = program.calls_to("multiprocessing.set_start_method", "torch.multiprocessing.set_start_method")
    methods = [argument(each, 0, "method") for each in chosen]
    if not methods:
        return ""
    return str(methods[-1].value) if isinstance(methods[-1], ast.Constant) else "?"


def _may_be_rank(facts: Facts, call: ast.Call) -> bool:
    """True if a started process uses CUDA or joins a process group, as far as the file shows it."""
    program = facts.program
    target = argument(call, 1, "target")
    targets = [target] if target is not None else []
    if target is None:
        function = program.function_of(call)
        maps = program.calls_to(".map", ".starmap", ".submit", ".apply", ".apply_async", ".imap", ".imap_unordered")
        targets = [each.args[0] for each in maps if each.args and program.function_of(each) is function]
    passed = argument(call, 2, "args") or argument(call, -1, "args")
    targets += passed.elts if isinstance(passed, (ast.Tuple, ast.List)) else []
    bodies = [f for each in targets for f in program.trace(each) if isinstance(f, (ast.FunctionDef, ast.Lambda))]
    uses = cuda_uses(program)
    joins = {*facts.inits, *(made for _, made in facts.collectives)}
    called = [call for body in bodies for call in program.calls_inside(body)]
    functions = {program.function_of(each) for each in called} | set(bodies)
    return any(each in joins for each in called) or any(program.function_of(use) in functions for use in uses)


def cuda_uses(program: Program) -> list[ast.expr]:
    """Return what initializes CUDA: devices, moves to them, and calls of `torch.cuda`."""
    found = list(device_uses(program))
    for name, calls in program.calls.items():
        module, _, last = name.rpartition(".")
        if module == "torch.cuda" and last not in (*_ASKS_CUDA, *_DEFERRED) and last[:1].islower():
            found += [call for call in calls if not last.startswith(("amp", "device", "Stream"))]
        elif name == ".cuda":
            found += [call for call in calls if call.args or call.keywords]
        elif name == ".to":
            found += [call for call in calls if call.args and _begins_with_cuda(call.args[0])]
    return found


def _begins_with_cuda(node: ast.expr) -> bool:
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
    return isinstance(first, ast.Constant) and str(first.value).startswith("cuda:") and first.value != "cuda:0"


def device_uses(program: Program) -> Iterator[ast.expr]:
    """Yield literals ``cuda`` and ``cuda:0`` that name a device, and calls ``.cuda()`` of a model or tensor."""
    for call in program.nodes[ast.Call]:
        assert isinstance(call, ast.Call)
        name = program.name_of(call)
        method = call.func.attr if isinstance(call.func, ast.Attribute) and not name else ""
        if method == "cuda" and not call.args and not call.keywords:
            yield call
        places = [keyword.value for keyword in call.keywords if keyword.arg == "device"]
        if (name == "torch.device" and len(call.args) == 1) or method == "to":
            places += call.args[:1]
        if method == "cuda":
            places += [a for a in call.args if is_constant(a, "cuda:0")]
        for place in places:
            for each in [place.body, place.orelse] if isinstance(place, ast.IfExp) else [place]:
                if is_constant(each, "cuda", "cuda:0"):
                    yield each
    for node in [*program.nodes[ast.Assign], *program.nodes[ast.AnnAssign]]:
        assert isinstance(node, (ast.Assign, ast.AnnAssign))
        value = node.value or ast.Constant(None)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [each for each in targets if "device" in ast.unparse(each).lower()]
        for each in [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]:
            if names and is_constant(each, "cuda", "cuda:0"):
                yield each


def is_only_named(program: Program, node: ast.expr) -> bool:
    """True if a device is only given a name here, as in ``device = torch.device("cuda")``."""
    if isinstance(node, ast.Call):
        return False
    call = program.parents.get(node)
    call = program.parents.get(call) if isinstance(call, ast.IfExp) else call
    return isinstance(call, ast.Assign) or (isinstance(call, ast.Call) and program.name_of(call) == "torch.device")


def line_in_cell(program: Program, node: ast.expr) -> int:
    """Return the line of `node` in its cell, or in the script."""
    return next((node.lineno - cell.start + 1 for cell in program.cells if node.lineno in cell), node.lineno)
