# SPDX-License-Identifier: Apache-2.0
"""The same mistakes as they are spelled with Lightning, Accelerate and fastai."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpilot.lint.program import argument, is_constant
from ddpilot.lint.rule import Facts, Report, rule

_MODULES = frozenset(
    f"{package}.{name}"
    for package in ("lightning", "lightning.pytorch", "pytorch_lightning")
    for name in ("LightningModule",)
)
_TRAINERS = frozenset(name.replace("LightningModule", "Trainer") for name in _MODULES)
_ACCELERATOR = "accelerate.Accelerator"


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
    for call in program.calls_to(".log"):
        assert isinstance(call.func, ast.Attribute)
        function, owner = program.function_of(call), program.class_of(call)
        is_evaluation = getattr(function, "name", "") in ("validation_step", "test_step")
        is_module = owner is not None and any(program.name_of(base) in _MODULES for base in owner.bases)
        value = argument(call, 1, "value")
        is_own = value is not None and any(isinstance(e, ast.Call) for e in program.trace(value))
        is_metric = value is not None and any(isinstance(e, ast.Attribute) for e in program.trace(value))
        if (
            is_evaluation
            and is_module
            and is_own
            and not is_metric
            and not any(k.arg in ("sync_dist", "rank_zero_only", None) for k in call.keywords)
        ):
            yield Report(call, "the value of one rank is logged: pass `sync_dist=True`, or log a torchmetrics metric")


def _is_parallel(call: ast.Call) -> bool:
    devices = argument(call, -1, "devices")
    strategy = argument(call, -1, "strategy")
    has_several = isinstance(devices, ast.Constant) and isinstance(devices.value, int) and devices.value > 1
    return has_several or (isinstance(strategy, ast.Constant) and str(strategy.value).startswith("ddp"))


@rule("DDP401")
def unprepared_loader(facts: Facts) -> Iterator[Report]:
    """An Accelerate program trains on a DataLoader that was not prepared."""
    program = facts.program
    prepares = _prepares(facts)
    if not prepares or program.calls_to(".prepare_data_loader"):
        return
    for call in program.calls_to(".backward"):
        assert isinstance(call.func, ast.Attribute)
        loops = program.loops_of(call)
        if not loops or not program.is_made_by(call.func.value, _ACCELERATOR):
            continue
        for loader in facts.loaders_of(loops[0]):
            assert isinstance(loops[0], (ast.For, ast.AsyncFor))
            made = program.made_by(loops[0].iter)
            if not any(each in prepares for _, each in made):
                yield Report(loader, "every rank reads the whole dataset: pass this loader to `accelerator.prepare`")


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
