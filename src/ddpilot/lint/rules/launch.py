# SPDX-License-Identifier: Apache-2.0
"""How ranks are started, choose their device, and end."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpilot.lint.program import Program, argument, is_constant
from ddpilot.lint.rule import OUR_INIT, Facts, Report, rule

_SPAWNS = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
_PROCESSES = ("torch.multiprocessing.Process", "multiprocessing.Process")
_NAMES_A_DEVICE = ("set_device", "CUDA_VISIBLE_DEVICES", "device_id=", "torch.cuda.device(", "set_default_device")
_ASKS_FOR_RANKS = re.compile(r"dist|rank|ddp|parallel|world_size|n_gpu", re.IGNORECASE)
_OTHER_USES = frozenset({"ddpilot", "unittest", "pytest"})
"""Imports of programs that choose devices otherwise, or run parts of a job in one process."""


@rule("DDP118")
def one_device(facts: Facts) -> Iterator[Report]:
    """All ranks use the same GPU: ``cuda:0``, or ``cuda`` without `torch.cuda.set_device`."""
    program = facts.program
    if not facts.is_distributed or program.imports & _OTHER_USES or "distributed.rpc" in program.text:
        return
    # A file without `init_process_group` may leave the device to the one that has it.
    chooses = not facts.inits or any(name in program.text for name in _NAMES_A_DEVICE)
    parents = {program.function_of(call) for call in program.calls_to(*_SPAWNS, *_PROCESSES)}
    for node in _device_uses(program):
        if program.function_of(node) in parents or _is_in_choice(program, node):
            continue
        text = str(node.value) if isinstance(node, ast.Constant) else "cuda"
        if text == "cuda" and chooses:
            continue
        if not facts.flow.runs_on_some_ranks(node) and not _is_map_location(program, node):
            yield Report(node, f"every rank uses the same GPU ({text}): use `cuda:{{local_rank}}`")
    for wrap in facts.wraps:
        ids = argument(wrap, 1, "device_ids")
        is_first = isinstance(ids, ast.List) and len(ids.elts) == 1 and is_constant(ids.elts[0], 0)
        if ids is not None and is_first and "CUDA_VISIBLE_DEVICES" not in program.text:
            yield Report(ids, "every rank uses the same GPU (device_ids=[0]): use `device_ids=[local_rank]`")


def _is_in_choice(program: Program, node: ast.AST) -> bool:
    """True if `node` is in a branch for one process, of a condition on ranks."""
    for child, parent in program.steps_outwards(node):
        is_else = isinstance(parent, ast.If) and program.fields[child] == "orelse"
        if is_else and isinstance(parent, ast.If) and _ASKS_FOR_RANKS.search(ast.unparse(parent.test)):
            return True
    return False


def _device_uses(program: Program) -> Iterator[ast.expr]:
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
        names = [each for each in targets if "device" in ast.unparse(each)]
        for each in [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]:
            if names and is_constant(each, "cuda", "cuda:0"):
                yield each


def _is_map_location(program: Program, node: ast.AST) -> bool:
    return any(isinstance(each, ast.keyword) and each.arg == "map_location" for each in program.ancestors(node))


@rule("DDP119")
def cuda_before_set_device(facts: Facts) -> Iterator[Report]:
    """CUDA is used before `torch.cuda.set_device`, so that every rank takes memory of GPU 0."""
    program = facts.program
    chosen = program.calls_to("torch.cuda.set_device")
    if not facts.is_distributed:
        return
    for choice in chosen[:1]:
        function = program.function_of(choice)
        early = [
            each
            for each in _device_uses(program)
            if program.function_of(each) is function
            and each.lineno < choice.lineno
            and not is_constant(each, "cuda:0")
            and not _is_only_named(program, each)
        ]
        if early:
            yield Report(
                early[0], f"CUDA is used before `set_device` (line {choice.lineno}): every rank uses GPU 0 here"
            )


def _is_only_named(program: Program, node: ast.expr) -> bool:
    """True if a device is only given a name here, as in ``device = torch.device("cuda")``."""
    if isinstance(node, ast.Call):
        return False
    call = program.parents.get(node)
    call = program.parents.get(call) if isinstance(call, ast.IfExp) else call
    return isinstance(call, ast.Assign) or (isinstance(call, ast.Call) and program.name_of(call) == "torch.device")


@rule("DDP120")
def init_twice(facts: Facts) -> Iterator[Report]:
    """`init_process_group` is called again while there is a group."""
    program = facts.program
    if "destroy_process_group" in program.text:
        return
    top = [
        call
        for call in program.calls_to("torch.distributed.init_process_group")
        if program.parents.get(program.parents[call]) is program.tree
    ]
    for call in top[1:]:
        yield Report(call, f"the process group exists since line {_line(program, top[0])}: this raises an error")


def _line(program: Program, node: ast.expr) -> int:
    return next((node.lineno - cell.start + 1 for cell in program.cells if node.lineno in cell), node.lineno)


@rule("DDP605")
def no_destroy(facts: Facts) -> Iterator[Report]:
    """A script creates a process group and never destroys it."""
    program = facts.program
    calls = [each for each in facts.inits if program.name_of(each) != OUR_INIT]
    helpers = re.search(r"import .*\b\w*(cleanup|clean_up|destroy|teardown|shutdown|finali[sz]e)\w*", program.text)
    is_destroyed = "destroy_process_group" in program.text or helpers or program.cells
    if calls and facts.is_script and not is_destroyed and _is_used_here(facts, calls[0]):
        yield Report(calls[0], "the process group is never destroyed: call `dist.destroy_process_group()` at the end")


def _is_used_here(facts: Facts, call: ast.Call) -> bool:
    """True if this file calls what creates the group, or starts it in processes."""
    function = facts.program.function_of(call)
    name = getattr(facts.program.class_of(call), "name", "") or getattr(function, "name", "")
    return function is facts.program.tree or len(re.findall(rf"\b{re.escape(name)}\b", facts.program.text)) > 1


@rule("DDP111")
def no_main_guard(facts: Facts) -> Iterator[Report]:
    """Processes are spawned at the top level of a script, without a main guard."""
    program = facts.program
    for call in [] if program.cells else program.calls_to(*_SPAWNS, *_PROCESSES, ".Process"):
        method = argument(call, 5, "start_method")
        around = [each for each in program.ancestors(call) if isinstance(each, (ast.If, ast.FunctionDef, ast.Lambda))]
        is_spawn = program.name_of(call) in _SPAWNS or "set_start_method" in program.text or _is_of_spawn(facts, call)
        if not around and is_spawn and not is_constant(method, "fork"):
            yield Report(call, "spawned ranks import this file and start ranks again: put it under a main guard")


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
            traced = list(program.trace(each))
            inner = [f for f in traced if isinstance(f, ast.FunctionDef) and program.function_of(f) is not program.tree]
            inner = [f for f in inner if program.class_of(f) is None]
            if any(isinstance(one, ast.Lambda) for one in traced) or inner:
                yield Report(
                    each, "a lambda or inner function cannot be sent to a spawned rank: define it in the module"
                )


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
    for call in program.calls_to("torch.multiprocessing.start_processes", "os.fork"):
        if program.name_of(call) != "os.fork" and not is_constant(argument(call, 5, "start_method"), "fork"):
            continue
        for use in _device_uses(program):
            is_before = program.function_of(use) is program.function_of(call) and use.lineno < call.lineno
            if is_before and not _is_only_named(program, use):
                yield Report(call, f"CUDA was used at line {_line(program, use)}: forked processes cannot use it")
                break


@rule("DDP121")
def deprecated_launch(facts: Facts) -> Iterator[Report]:
    """A script takes `--local_rank`, or starts `torch.distributed.launch`, which torchrun has replaced."""
    program = facts.program
    passes_option = "deepspeed" in program.imports  # whose launcher does
    for call in program.calls_to(".add_argument") if facts.inits and not passes_option else ():
        names = [each.value for each in call.args if isinstance(each, ast.Constant)]
        if ("--local_rank" in names or "--local-rank" in names) and "LOCAL_RANK" not in program.text:
            yield Report(call, 'torchrun passes no `--local_rank`: read `int(os.environ["LOCAL_RANK"])`')
    for node in program.nodes[ast.Constant]:
        if is_constant(node, "torch.distributed.launch"):
            yield Report(node, "`torch.distributed.launch` is deprecated: start `torchrun` or `ddpilot run`")
