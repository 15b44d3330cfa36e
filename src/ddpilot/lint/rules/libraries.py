# SPDX-License-Identifier: Apache-2.0
"""The same mistakes as they are spelled with Lightning, Accelerate and fastai."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpilot.lint.program import argument, is_constant
from ddpilot.lint.rule import Facts, Report, rule
from ddpilot.lint.rules.checkpoints import saved_by_all_ranks
from ddpilot.lint.rules.data import is_divided
from ddpilot.lint.rules.metrics import prints_of_own_loss
from ddpilot.lint.rules.models import is_counted, is_optimizer_step, is_wrapped_here
from ddpilot.lint.rules.processes import device_uses
from ddpilot.lint.scopes import Loop

_MODULES = frozenset(
    f"{package}.{name}"
    for package in ("lightning", "lightning.pytorch", "pytorch_lightning")
    for name in ("LightningModule",)
)
_TRAINERS = frozenset(name.replace("LightningModule", "Trainer") for name in _MODULES)
_ACCELERATOR = "accelerate.Accelerator"
_FABRICS = ("lightning.Fabric", "lightning.fabric.Fabric", "lightning_fabric.Fabric")
_OF_ALL_RANKS = {
    "trainer": frozenset({"save_checkpoint", "fit", "validate", "test", "predict"}),
    "fabric": frozenset({"save", "load"}),
    "module": frozenset({"all_gather"}),
    "strategy": frozenset({"barrier", "broadcast", "reduce", "all_gather", "all_reduce"}),
    "learner": frozenset({"validate", "get_preds", "fit", "fit_one_cycle", "fine_tune"}),
}
"""Methods that all ranks have to call, by the kind of their owner."""


@rule("DDP118")
def lightning_device(facts: Facts) -> Iterator[Report]:
    """A LightningModule moves tensors to the first GPU by itself."""
    program = facts.program
    for owner in program.nodes[ast.ClassDef]:
        if not isinstance(owner, ast.ClassDef) or not any(program.name_of(base) in _MODULES for base in owner.bases):
            continue
        for call in ast.walk(owner):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or program.name_of(call):
                continue
            is_cuda = call.func.attr == "cuda" and not call.args and not call.keywords
            if is_cuda or (call.func.attr == "to" and call.args and is_constant(call.args[0], "cuda", "cuda:0")):
                yield Report(call, "every rank uses the first GPU here: use `self.device`, which Lightning sets")


@rule("DDP411")
def lightning_log(facts: Facts) -> Iterator[Report]:
    """A LightningModule that trains on several devices logs a value of one rank's validation."""
    program = facts.program
    if not any(_is_parallel(call) for call in program.calls_to(*_TRAINERS)):
        return
    for call in program.calls_to(".log", ".log_dict"):
        assert isinstance(call.func, ast.Attribute)
        value = argument(call, 1, "value") if call.func.attr == "log" else argument(call, 0, "dictionary")
        traced = program.trace(value) if value is not None else []
        is_own = any(isinstance(each, (ast.Call, ast.Dict)) for each in traced)
        is_metric = any(isinstance(each, ast.Attribute) for each in traced)
        is_said = any(k.arg in ("sync_dist", "rank_zero_only", None) for k in call.keywords)
        if _is_of_module(facts, call) and _evaluates(facts, call) and is_own and not is_metric and not is_said:
            yield Report(call, "the value of one rank is logged: pass `sync_dist=True`, or log a torchmetrics metric")


def _is_of_module(facts: Facts, node: ast.AST) -> bool:
    """True in a LightningModule."""
    owner = facts.program.class_of(node)
    return owner is not None and any(facts.program.name_of(base) in _MODULES for base in owner.bases)


def _evaluates(facts: Facts, call: ast.Call) -> bool:
    """True in `validation_step` and `test_step`, and in methods that these call."""
    function = facts.program.function_of(call)
    functions = [function, *(facts.program.function_of(site) for site in facts.program.call_sites(function))]
    return any(getattr(each, "name", "") in ("validation_step", "test_step") for each in functions)


def _is_parallel(call: ast.Call) -> bool:
    """True if a Trainer is given several devices, or a strategy of DDP."""
    counts = [argument(call, -1, name) for name in ("devices", "gpus")]
    names = [argument(call, -1, name) for name in ("strategy", "accelerator")]
    has_several = any(isinstance(e, ast.Constant) and isinstance(e.value, int) and e.value > 1 for e in counts)
    has_all = any(e is not None and ast.unparse(e) == "-1" for e in counts)
    return has_several or has_all or any(isinstance(e, ast.Constant) and str(e.value).startswith("ddp") for e in names)


@rule("DDP220")
def library_call_on_some_ranks(facts: Facts) -> Iterator[Report]:
    """A call of Lightning, Fabric or fastai that all ranks have to make, under a condition on the rank."""
    program = facts.program
    if (
        not program.imports & {"lightning", "pytorch_lightning", "lightning_fabric"}
        and "distrib_ctx" not in program.text
    ):
        return
    for name in {f".{method}" for methods in _OF_ALL_RANKS.values() for method in methods} | {".log", ".log_dict"}:
        for call in program.calls_to(name):
            assert isinstance(call.func, ast.Attribute)
            if not _needs_all_ranks(facts, call):
                continue
            guard = facts.flow.rank_guard(call)
            is_condition = guard is not None and guard.kind != "handler"
            if is_condition or facts.flow.is_decorated(program.function_of(call)):
                yield Report(call, f"`{call.func.attr}` has to be called by all ranks, and only some call it here")


def _needs_all_ranks(facts: Facts, call: ast.Call) -> bool:
    assert isinstance(call.func, ast.Attribute)
    program, owner, method = facts.program, call.func.value, call.func.attr
    if method in ("log", "log_dict"):
        is_synced = any(each.arg == "sync_dist" and is_constant(each.value, True) for each in call.keywords)
        return is_synced and _is_of_module(facts, call)
    last = getattr(owner, "attr", getattr(owner, "id", ""))
    kinds = {
        "trainer": program.is_made_by(owner, *_TRAINERS) or (last == "trainer" and _is_of_module(facts, call)),
        "fabric": program.is_made_by(owner, *_FABRICS),
        "module": last == "self" and _is_of_module(facts, call),
        "strategy": last == "strategy" and bool(program.imports & {"lightning", "pytorch_lightning"}),
        "learner": "learn" in last and "distrib_ctx" in program.text,
    }
    return any(is_kind and method in _OF_ALL_RANKS[kind] for kind, is_kind in kinds.items())


@rule("DDP603")
def library_save_on_all_ranks(facts: Facts) -> Iterator[Report]:
    """`torch.save` on every rank of a program with Lightning, Accelerate or fastai."""
    program = facts.program
    is_parallel = any(_is_parallel(call) for call in program.calls_to(*_TRAINERS))
    is_accelerate = bool(program.calls_to(_ACCELERATOR)) and bool(_prepares(facts))
    contexts = {program.function_of(call) for call in program.calls_to(".distrib_ctx")}
    if not (is_parallel or is_accelerate or contexts):
        return
    for call in program.calls_to("torch.save"):
        is_hook = _is_of_module(facts, call) and getattr(program.function_of(call), "name", "").startswith("on_")
        is_method = is_accelerate and program.class_of(call) is not None
        is_called = is_hook or is_method or program.function_of(call) in contexts
        yield from saved_by_all_ranks(facts, call, argument(call, 1, "f"), is_called=is_called)


@rule("DDP337")
def library_gets_wrapper(facts: Facts) -> Iterator[Report]:
    """A model that Accelerate, Fabric or Lightning wraps is wrapped by hand."""
    program = facts.program
    setups = [*_prepares(facts), *_setups(facts)]
    setups += [call for call in program.calls_to(".fit") if program.is_made_by(call.func.value, *_TRAINERS)]  # type: ignore[attr-defined]
    for call in setups if facts.wraps else ():
        if any(is_wrapped_here(facts, each) for each in call.args):
            yield Report(call, "this wraps the model itself: give it the plain model")


@rule("DDP338")
def backward_of_tensor(facts: Facts) -> Iterator[Report]:
    """`loss.backward()` in a program of Accelerate, Fabric or Lightning, whose own `backward` scales the loss."""
    program = facts.program
    fixes = {"accelerator.backward(loss)": _prepares(facts), "fabric.backward(loss)": _setups(facts)}
    owner = next((text for text, calls in fixes.items() if calls), "")
    for call in program.calls_to(".backward"):
        assert isinstance(call.func, ast.Attribute)
        if program.is_made_by(call.func.value, _ACCELERATOR, *_FABRICS) or not _is_loss(call.func.value):
            continue
        if _is_of_module(facts, call) and getattr(program.function_of(call), "name", "") == "training_step":
            yield Report(call, "gradients are not scaled, and DDP is not prepared: call `self.manual_backward(loss)`")
        elif owner and any(_runs_prepared(facts, loop) for loop in program.loops_of(call)):
            yield Report(call, f"neither precision nor accumulation of the library applies: call `{owner}`")


def _runs_prepared(facts: Facts, loop: Loop) -> bool:
    """True if `loop` calls a model that Accelerate or Fabric has prepared."""
    prepares = {*_prepares(facts), *_setups(facts)}
    calls = (call.func for call in facts.program.calls_inside(loop))
    return any(each in prepares for function in calls for each in facts.program.trace(function))


def _is_loss(node: ast.expr) -> bool:
    return not isinstance(node, ast.Call) and "engine" not in ast.unparse(node)


def _setups(facts: Facts) -> list[ast.Call]:
    """Return the calls of `fabric.setup`."""
    calls = facts.program.calls_to(".setup", ".setup_module")
    owners = [(call, call.func.value) for call in calls if isinstance(call.func, ast.Attribute)]
    return [call for call, owner in owners if facts.program.is_made_by(owner, *_FABRICS)]


@rule("DDP118")
def library_device(facts: Facts) -> Iterator[Report]:
    """A program of Accelerate or Fabric moves tensors to the first GPU by itself."""
    for node in device_uses(facts.program) if _prepares(facts) or _setups(facts) else ():
        if is_constant(node, "cuda:0") and not facts.inits and not facts.flow.runs_on_some_ranks(node):
            yield Report(node, "every rank uses the same GPU (cuda:0): use the device of the library")


@rule("DDP505")
def accelerate_accumulation(facts: Facts) -> Iterator[Report]:
    """Gradients are accumulated by hand over micro-batches, and Accelerate exchanges them after each."""
    program = facts.program
    if not _prepares(facts) or re.search(r"\.accumulate\(|no_sync|sync_gradients", program.text):
        return
    for call in program.calls_to(".backward"):
        assert isinstance(call.func, ast.Attribute)
        loops = program.loops_of(call)
        if not loops or not program.is_made_by(call.func.value, _ACCELERATOR):
            continue
        steps = [each for each in program.calls_inside(loops[0]) if is_optimizer_step(each)]
        if steps and all(is_counted(facts, each, loops[0]) for each in steps) and not is_counted(facts, call, loops[0]):
            yield Report(
                call, "gradients are exchanged after every micro-batch: use `with accelerator.accumulate(model)`"
            )


@rule("DDP411")
def accelerate_print(facts: Facts) -> Iterator[Report]:
    """Every rank of an Accelerate program prints in each step, its own loss among it."""
    program = facts.program
    loops = {
        loop: None
        for call in program.calls_to(".backward")
        if isinstance(call.func, ast.Attribute) and program.is_made_by(call.func.value, _ACCELERATOR)
        for loop in program.loops_of(call)[:1]
    }
    for loop in loops if _prepares(facts) else ():
        yield from prints_of_own_loss(facts, loop)


@rule("DDP401")
def unprepared_loader(facts: Facts) -> Iterator[Report]:
    """A program of Accelerate or Fabric trains on a DataLoader that was not prepared."""
    program = facts.program
    prepares = [*_prepares(facts), *_setups(facts)]
    if not prepares or facts.wraps or program.calls_to(".prepare_data_loader"):
        return
    done: set[ast.AST] = set()
    for call in program.calls_to(".backward"):
        for loop in program.loops_of(call)[:1]:
            for loader in facts.loaders_of(loop) if _runs_prepared(facts, loop) else ():
                made = [] if isinstance(loop, ast.While) else program.made_by(loop.iter)
                is_prepared = any(each in prepares for _, each in made)
                if not is_prepared and loader not in done and not _knows_ranks(facts, loader):
                    done.add(loader)
                    yield Report(loader, "every rank reads the whole dataset: pass this loader to the library's setup")


def _knows_ranks(facts: Facts, loader: ast.Call) -> bool:
    """True if a loader gets a sampler of each rank's part."""
    has_sampler = any(each.arg in ("sampler", "batch_sampler") for each in loader.keywords)
    return has_sampler and is_divided(facts, loader)


@rule("DDP602")
def prepared_state_dict(facts: Facts) -> Iterator[Report]:
    """The `state_dict()` of what `accelerator.prepare` returned is saved by `torch.save`."""
    program, prepares = facts.program, _prepares(facts)
    for call in program.calls_to(".state_dict") if prepares else ():
        assert isinstance(call.func, ast.Attribute)
        is_model = "optim" not in ast.unparse(call.func.value) and "sched" not in ast.unparse(call.func.value)
        is_prepared = any(each in prepares for each in program.trace(call.func.value))
        saved = [each for each in program.ancestors(call) if isinstance(each, ast.Call)]
        if is_model and is_prepared and any(program.name_of(each) == "torch.save" for each in saved):
            yield Report(call, "save `accelerator.unwrap_model(model).state_dict()`: the wrapper's names have a prefix")


def _prepares(facts: Facts) -> list[ast.Call]:
    calls = facts.program.calls_to(".prepare", ".prepare_model")
    owners = [(call, call.func.value) for call in calls if isinstance(call.func, ast.Attribute)]
    return [call for call, owner in owners if facts.program.is_made_by(owner, _ACCELERATOR)]


@rule("DDP330")
def fastai_parallel(facts: Facts) -> Iterator[Report]:
    """fastai's `to_parallel` and `parallel_ctx`, which use `nn.DataParallel`."""
    for call in facts.program.calls_to(".to_parallel", ".parallel_ctx") if "fastai" in facts.program.text else ():
        yield Report(call, "fastai uses `nn.DataParallel` here: train in `learn.distrib_ctx()` on several ranks")
