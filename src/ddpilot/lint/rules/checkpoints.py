# SPDX-License-Identifier: Apache-2.0
"""Saving and loading checkpoints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpilot.lint.program import argument
from ddpilot.lint.rule import Facts, Report, rule
from ddpilot.module_names import LAUNCH

_SAVES = ("torch.save", "safetensors.torch.save_file")


@rule("DDP602", is_fixable=True)
def wrapped_state_dict(facts: Facts) -> Iterator[Report]:
    """The `state_dict()` of a DDP wrapper is saved, with `module.` in front of every name."""
    program = facts.program
    loads = [call for call in program.calls_to(".load_state_dict") if facts.is_ddp(call.func.value)]  # type: ignore[attr-defined]
    calls = (call for some in program.calls.values() for call in some)
    helpers = [call for call in calls if re.search("load|resume|restart|restore", ast.unparse(call.func))]
    given = [each for call in helpers for each in [*call.args, *(keyword.value for keyword in call.keywords)]]
    loads += [each for each in given if isinstance(each, ast.Name) and facts.is_ddp(each)]  # type: ignore[misc]
    if loads or not facts.wraps or "module." in re.sub(r"\.module\.", "", program.text):
        return
    for call in program.calls_to(".state_dict"):
        assert isinstance(call.func, ast.Attribute)
        owner = call.func.value
        if facts.is_ddp(owner) and not _is_unwrapped_elsewhere(facts, call) and _is_saved(facts, call):
            is_always = facts.program.is_made_by(owner, "DDP") and not _may_be_plain(facts, owner)
            yield Report(
                call, "names in this checkpoint begin with `module.`: save `model.module.state_dict()`",
                ("insert-module", "") if is_always else None,
            )  # fmt: skip


def _may_be_plain(facts: Facts, owner: ast.expr) -> bool:
    if not isinstance(owner, ast.Name):
        return True
    bindings = facts.program.bindings(owner)
    return len(bindings) != 1 or facts.program.name_of(bindings[0].value or owner) != "DDP"


def _is_unwrapped_elsewhere(facts: Facts, node: ast.AST) -> bool:
    """True if the other branch of a condition around `node` uses ``.module``: the program tells wrappers apart."""
    around = [each for each in facts.program.ancestors(node) if isinstance(each, (ast.If, ast.IfExp))]
    return any(".module" in ast.unparse(each) or "isinstance" in ast.unparse(each.test) for each in around)


def _is_saved(facts: Facts, node: ast.AST) -> bool:
    """True if `node`, or a value around it, is passed to a function that saves, also through functions of the file."""
    program = facts.program
    values = {node, *program.ancestors(node)}
    saved = [part for save in program.calls_to(*_SAVES) for given in save.args[:1] for part in ast.walk(given)]
    return any(each in values for part in saved for each in program.trace(part))


@rule("DDP603")
def all_ranks_save(facts: Facts) -> Iterator[Report]:
    """Every rank saves to the same file."""
    for call in facts.program.calls_to("torch.save") if facts.wraps else ():
        yield from saved_by_all_ranks(facts, call, argument(call, 1, "f"))


def saved_by_all_ranks(
    facts: Facts, call: ast.Call, path: ast.expr | None, *, is_called: bool = False
) -> Iterator[Report]:
    """Report a call that writes `path` on every rank. `is_called`: the function around it is called from elsewhere."""
    program, function = facts.program, facts.program.function_of(call)
    is_called = is_called or function is program.tree or bool(program.call_sites(function)) or _starts(facts, function)
    if path is None or not is_called or facts.flow.runs_on_some_ranks(call) or _may_be_per_rank(facts, path):
        return
    if not _is_buffer(facts, path):
        yield Report(call, f"every rank writes {ast.unparse(path)[:40]}: save on rank 0 only")


def _starts(facts: Facts, function: ast.AST) -> bool:
    """True if `function` is started in ranks, as by `mp.spawn`."""
    name = getattr(function, "name", "")
    spawns = facts.program.calls_to(
        "torch.multiprocessing.spawn", "torch.multiprocessing.Process", LAUNCH.replace(":", ".")
    )
    return any(isinstance(e, ast.Name) and e.id == name for call in spawns for e in ast.walk(call))


def _may_be_per_rank(facts: Facts, path: ast.expr) -> bool:
    traced = list(facts.program.trace(path))
    inner = [each for one in traced for each in ast.walk(one) if isinstance(each, (ast.Name, ast.Attribute, ast.Call))]
    return any("rank" in ast.unparse(one) for one in traced) or any(facts.flow.differs(each) for each in inner)


def _is_buffer(facts: Facts, path: ast.expr) -> bool:
    path = path.value if isinstance(path, ast.Attribute) and path.attr == "name" else path
    opened = [each.value for each in facts.program.bindings(path) if each.value] if isinstance(path, ast.Name) else []
    names = [name for each in (path, *opened) for name, _ in facts.program.made_by(each)]
    return any(name.endswith("BytesIO") or name.startswith("tempfile.") for name in names)


@rule("DDP608")
def load_without_barrier(facts: Facts) -> Iterator[Report]:
    """All ranks load what rank 0 saves, with no barrier in between."""
    program = facts.program
    if not facts.is_distributed:
        return
    for load in program.calls_to("torch.load"):
        path = argument(load, 0, "f")
        if path is None or facts.flow.rank_guard(load) is not None:
            continue
        for place in [load, *program.call_sites(program.function_of(load))]:
            save = _save_before(facts, place, path)
            if save is not None:
                yield Report(
                    load, f"rank 0 may not have written it yet (line {save.lineno}): call a barrier in between"
                )
                break


def _save_before(facts: Facts, place: ast.Call, path: ast.expr) -> ast.Call | None:
    """Return the call by which rank 0 writes `path` before `place` in its function, with no collective in between."""
    program = facts.program
    function = program.function_of(place)
    saves = [
        save
        for save in program.calls_to("torch.save")
        if program.function_of(save) is function
        and save.lineno < place.lineno
        and (target := argument(save, 1, "f")) is not None
        and ast.dump(target) == ast.dump(path)
        and facts.flow.rank_guard(save) is not None
    ]
    waits = [call.lineno for _, call in facts.collectives if program.function_of(call) is function]
    if not saves or any(saves[-1].lineno < line < place.lineno for line in waits):
        return None
    return saves[-1]


@rule("DDP609", is_fixable=True)
def load_without_map_location(facts: Facts) -> Iterator[Report]:
    """A checkpoint is loaded on every rank without `map_location`, which puts all copies on the GPU that saved it."""
    program = facts.program
    if not facts.wraps or "cuda" not in program.text:
        return
    for call in program.calls_to("torch.load"):
        path = argument(call, 0, "f")
        choices = [each for each in program.ancestors(call) if isinstance(each, ast.If)]
        if any("map_location" in ast.unparse(each) for each in choices):
            continue
        has_device = argument(call, 1, "map_location") is not None or any(each.arg is None for each in call.keywords)
        if has_device or path is None or facts.flow.runs_on_some_ranks(call) or not _is_loaded_into_model(facts, call):
            continue
        yield Report(call, 'without `map_location` every rank loads to the GPU that saved it: `map_location="cpu"`',
                     ("add-argument", 'map_location="cpu"'))  # fmt: skip


def _is_loaded_into_model(facts: Facts, call: ast.Call) -> bool:
    loads = facts.program.calls_to(".load_state_dict")
    loads = [load for load in loads if not re.search("scaler|sched|optim", ast.unparse(load.func))]
    return any(
        call is each for load in loads for a in load.args for n in ast.walk(a) for each in facts.program.trace(n)
    )


@rule("DDP610", is_fixable=True)
def load_by_default(facts: Facts) -> Iterator[Report]:
    """A checkpoint is loaded without `weights_only`, whose default depends on the version of torch."""
    program = facts.program
    for call in program.calls_to("torch.load") if facts.is_distributed else ():
        given = {keyword.arg for keyword in call.keywords}
        choices = [each for each in program.ancestors(call) if isinstance(each, (ast.If, ast.Try))]
        is_choice = any("weights_only" in ast.unparse(each) for each in choices)
        if not given & {"weights_only", "pickle_module", None} and call.args and not is_choice:
            yield Report(
                call, "torch before 2.6 runs any code that this file contains: `weights_only=True`",
                ("add-argument", "weights_only=True"),
            )  # fmt: skip
