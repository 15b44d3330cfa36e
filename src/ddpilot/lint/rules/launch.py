# SPDX-License-Identifier: Apache-2.0
"""How ranks are started, choose their device, and end."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpilot.lint.program import Program, argument, is_constant
from ddpilot.lint.rule import OUR_INIT, Facts, Report, rule
from ddpilot.lint.rules.processes import STARTERS, device_uses, is_only_named, line_in_cell

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
    parents = {program.function_of(call) for call in program.calls_to(*STARTERS)}
    for node in device_uses(program):
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
        for site in _sites_of(program, choice):
            function = program.function_of(site)
            early = [
                each
                for each in device_uses(program)
                if program.function_of(each) is function
                and each.lineno < site.lineno
                and not is_constant(each, "cuda:0")
                and not is_only_named(program, each)
            ]
            if early:
                yield Report(
                    early[0], f"CUDA is used before `set_device` (line {choice.lineno}): every rank uses GPU 0 here"
                )
                return


def _sites_of(program: Program, call: ast.Call, depth: int = 3) -> Iterator[ast.Call]:
    """Yield `call`, and the calls of the functions of this file around it."""
    yield call
    for site in program.call_sites(program.function_of(call)) if depth else ():
        yield from _sites_of(program, site, depth - 1)


@rule("DDP120")
def init_twice(facts: Facts) -> Iterator[Report]:
    """`init_process_group` is called again while there is a group."""
    program = facts.program
    if "destroy_process_group" in program.text:
        return
    inits = [
        site
        for call in program.calls_to("torch.distributed.init_process_group")
        if not any("is_initialized" in ast.unparse(each.test) for each in _choices(program, call))
        for site in _sites_of(program, call)
        if program.parents.get(program.parents[site]) is program.tree
    ]
    inits.sort(key=lambda each: (each.lineno, each.col_offset))
    for call in inits[1:]:
        yield Report(
            call, f"the process group exists since line {line_in_cell(program, inits[0])}: this raises an error"
        )


def _choices(program: Program, node: ast.AST) -> Iterator[ast.If | ast.IfExp]:
    """Yield the conditions around `node`, and those before it at which its function returns."""
    yield from (each for each in program.ancestors(node) if isinstance(each, (ast.If, ast.IfExp)))
    for each in program.inside(program.function_of(node), ast.If):
        if isinstance(each, ast.If) and isinstance(each.body[-1], ast.Return):
            yield each


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
        if is_constant(node, "torch.distributed.launch") or _is_command(program, node):
            yield Report(node, "`torch.distributed.launch` is deprecated: start `torchrun` or `ddpilot run`")


def _is_command(program: Program, node: ast.AST) -> bool:
    """True for a line of a shell that starts `torch.distributed.launch`."""
    if not isinstance(node, ast.Constant) or "-m torch.distributed.launch" not in str(node.value):
        return False
    calls = (program.name_of(each) for each in program.ancestors(node) if isinstance(each, ast.Call))
    return any(name == "os.system" or name.startswith("subprocess.") for name in calls)
