# SPDX-License-Identifier: Apache-2.0
"""How a model is wrapped, moved, accumulated and normalised, and mixed precision."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from ddpilot.lint.program import argument, is_constant
from ddpilot.lint.rule import Facts, Report, rule
from ddpilot.lint.scopes import Loop

_SCALERS = ("torch.cuda.amp.GradScaler", "torch.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler")
_CLIPS = (
    "torch.nn.utils.clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_",
    "torch.nn.utils.clip_grad.clip_grad_norm_",
)
_OLD_AMP = {"torch.cuda.amp.autocast": "torch.amp.autocast", "torch.cuda.amp.GradScaler": "torch.amp.GradScaler"}


@rule("DDP335")
def scaler_misuse(facts: Facts) -> Iterator[Report]:
    """A GradScaler whose `update`, `unscale_` or `step` is missing."""
    program = facts.program
    if not facts.is_distributed or not program.calls_to(*_SCALERS):
        return
    scaled = [call for call in program.calls_to(".scale") if _is_scaler(facts, call)]
    if not scaled or any(call.func.attr in ("scale", "step") for call in _on_unknown(facts)):  # type: ignore[attr-defined]
        return
    steps = [call for call in program.calls_to(".step") if _is_scaler(facts, call)]
    updates = [call for call in program.calls_to(".update") if _is_scaler(facts, call)]
    if not steps:
        yield Report(scaled[0], "the loss is scaled and the gradients are not: call `scaler.step(optimizer)`")
    elif not updates:
        yield Report(steps[0], "`scaler.step` without `scaler.update()`: the scale never changes")
    yield from _stepped_without(facts, scaled)
    unscaled = [call for call in program.calls_to(".unscale_") if _is_scaler(facts, call)]
    for clip in program.calls_to(*_CLIPS) if not unscaled and steps else ():
        if any(_is_with(facts, clip, step) for step in steps):
            yield Report(clip, "scaled gradients are clipped: call `scaler.unscale_(optimizer)` before")


def _stepped_without(facts: Facts, scaled: list[ast.Call]) -> Iterator[Report]:
    """Yield steps of an optimizer in a function that scales the loss and never calls `scaler.step`."""
    program = facts.program
    for function in dict.fromkeys(program.function_of(call) for call in scaled):
        inside = list(program.calls_inside(function))
        steps = [call for call in inside if isinstance(call.func, ast.Attribute) and call.func.attr == "step"]
        if any(_is_scaler(facts, call) for call in steps) or any(_unscales(facts, call) for call in inside):
            continue
        for call in steps:
            assert isinstance(call.func, ast.Attribute)
            if "opt" in ast.unparse(call.func.value).lower() and program.function_of(call) is function:
                yield Report(call, "the gradients are still scaled here: call `scaler.step(optimizer)`")


def _unscales(facts: Facts, call: ast.Call) -> bool:
    return getattr(call.func, "attr", "") == "unscale_" and _is_scaler(facts, call)


def _is_scaler(facts: Facts, call: ast.Call) -> bool:
    assert isinstance(call.func, ast.Attribute)
    return facts.program.is_made_by(call.func.value, *_SCALERS)


def _is_with(facts: Facts, clip: ast.Call, step: ast.Call) -> bool:
    """True if both calls are in one function, and not in different branches of a condition."""
    program = facts.program
    return program.function_of(clip) is program.function_of(step) and not program.exclude_each_other(clip, step)


def _on_unknown(facts: Facts) -> list[ast.Call]:
    """Calls on a scaler that the file does not show to be one, as when it is passed through other files."""
    calls = facts.program.calls_to(".scale", ".step")
    names = [call for call in calls if "scaler" in ast.unparse(call.func).lower() and not _is_scaler(facts, call)]
    return [call for call in names if isinstance(call.func, ast.Attribute)]


@rule("DDP336", is_fixable=True)
def deprecated_amp(facts: Facts) -> Iterator[Report]:
    """`torch.cuda.amp`, which `torch.amp` has replaced."""
    for call in facts.program.calls_to(*_OLD_AMP) if facts.is_distributed else ():
        name = facts.program.name_of(call)
        is_safe = ast.unparse(call.func) == name and not call.args
        edit = ("rename-amp", _OLD_AMP[name]) if is_safe else None
        yield Report(call, f'`{name}` is deprecated: use `{_OLD_AMP[name]}("cuda")`', edit)


_MOVES = ("to", "cuda", "xpu", "double", "half", "bfloat16")
_MIN_SAMPLES = 16
"""Fewer samples on each rank make statistics of BatchNorm noisy; the same number as that of `guard`'s rule."""
_AVERAGES = re.compile(
    r"fsdp|fully_shard|FullyShardedDataParallel|deepspeed|horovod|hvd|apex|parallel|average|sync|accelerat|fabric|rpc"
    r"|\.grad\b|pipelin|megatron|bagua|hivemind|federat|ddpilot",
    re.IGNORECASE,
)
"""Words of programs that average gradients in a different way, or train different models on purpose."""
_MODELS_WITH_NORM = re.compile(
    r"torchvision\.models\.(?:resnet|resnext|wide_resnet|densenet|mobilenet|efficientnet|mnasnet|shufflenet|regnet|vgg\d+_bn)"
)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BATCH_NORMS = frozenset({"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LazyBatchNorm1d", "LazyBatchNorm2d"})


@rule("DDP330")
def data_parallel(facts: Facts) -> Iterator[Report]:
    """`nn.DataParallel`, which is slower than DDP and exchanges nothing between ranks."""
    for call in facts.program.calls_to("DataParallel"):
        choices = [each for each in facts.program.ancestors(call) if isinstance(each, (ast.If, ast.IfExp))]
        is_choice = any("rank" in (test := ast.unparse(each.test).lower()) or "dist" in test for each in choices)
        if not (choices and facts.wraps) and not is_choice:
            yield Report(call, "`nn.DataParallel` splits batches in one process: use DistributedDataParallel")


@rule("DDP331", is_fixable=True)
def wrapped_before_move(facts: Facts) -> Iterator[Report]:
    """A model is moved or cast after DDP wrapped it."""
    program = facts.program
    for call in program.calls_to(*(f".{name}" for name in _MOVES)) if facts.wraps else ():
        assert isinstance(call.func, ast.Attribute)
        owner = call.func.value
        if not _moves_parameters(call) or not facts.is_ddp(owner):
            continue
        wraps = [made for name, made in program.made_by(owner) if name == "DDP" and made.args]
        moved = any(_is_moved(each) for wrap in wraps for each in program.trace(wrap.args[0]))
        moved = moved or any(_is_moved_before(facts, wrap) for wrap in wraps)
        used = any(f.lineno < call.lineno and _same_function(facts, f, call) for f in facts.forwards)
        if not moved and not used and _is_wrapped_before(facts, owner, wraps):
            is_direct = len(wraps) == 1 and owner is wraps[0] and isinstance(program.parents[call], ast.Assign)
            edit = ("move-inside", call.func.attr) if is_direct and len(wraps[0].args) == 1 else None
            yield Report(call, f"`.{call.func.attr}()` after wrapping: move the model first, then wrap it", edit)


def _is_wrapped_before(facts: Facts, owner: ast.expr, wraps: list[ast.Call]) -> bool:
    """True if `owner` is wrapped in its function, not through a parameter or an attribute that a method sets."""
    program = facts.program
    if any(_same_function(facts, wrap, owner) for wrap in wraps):
        return True
    here = [each for each in program.trace(owner) if isinstance(each, ast.Call) and _same_function(facts, each, owner)]
    functions = [function for each in here for function in program.callees(each)]
    return any(len(list(program.inside(function, ast.Return))) == 1 for function in functions)


def _moves_parameters(call: ast.Call) -> bool:
    assert isinstance(call.func, ast.Attribute)
    return call.func.attr != "to" or bool(call.args) or any(each.arg in ("device", "dtype") for each in call.keywords)


def _is_moved_before(facts: Facts, wrap: ast.Call) -> bool:
    """True for ``model.cuda()`` as a statement before `wrap`: it changes the module itself."""
    wrapped = ast.dump(wrap.args[0])
    calls = facts.program.calls_to(*(f".{name}" for name in _MOVES))
    owners = [(call, call.func.value) for call in calls if isinstance(call.func, ast.Attribute)]
    return any(
        call.lineno < wrap.lineno and ast.dump(owner) == wrapped and _same_function(facts, call, wrap)
        for call, owner in owners
    )


def _is_moved(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    is_move = isinstance(node.func, ast.Attribute) and node.func.attr in _MOVES
    return is_move or any(keyword.arg == "device" for keyword in node.keywords)


def _same_function(facts: Facts, one: ast.AST, other: ast.AST) -> bool:
    return facts.program.function_of(one) is facts.program.function_of(other)


def is_wrapped_here(facts: Facts, node: ast.expr) -> bool:
    """Return True if `node` is a DDP wrapper that its own function makes."""
    made = [call for name, call in facts.program.made_by(node) if name == "DDP"]
    return facts.is_ddp(node) and any(_same_function(facts, call, node) for call in made)


@rule("DDP324")
def never_wrapped(facts: Facts) -> Iterator[Report]:
    """A model trains on every rank, and nothing averages its gradients."""
    program = facts.program
    if not facts.inits or facts.wraps or _AVERAGES.search(program.text) or facts.collectives_of_tensors:
        return
    for loop in facts.step_loops:
        for call in program.inside(loop, ast.Call):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and _is_plain_model(facts, call.func):
                yield Report(call, "this model is not wrapped: each rank trains its own. Use DistributedDataParallel")
                return


def _is_plain_model(facts: Facts, node: ast.Name) -> bool:
    """True if a variable is always a module that this file creates."""
    made = [(name, each) for name, each in facts.program.made_by(node) if name not in ("", "torch.compile")]
    return bool(made) and all(name.startswith("torch.nn.") and "functional" not in name for name, _ in made)


@rule("DDP326")
def step_on_some_ranks(facts: Facts) -> Iterator[Report]:
    """The optimizer of a DDP model steps under a condition on the rank."""
    program = facts.program
    for loop in facts.step_loops if facts.wraps else ():
        for call in program.inside(loop, ast.Call):
            if not isinstance(call, ast.Call) or not is_optimizer_step(call) or not facts.trains_ddp(loop):
                continue
            guard = facts.flow.rank_guard(call)
            is_alone = guard is not None and guard.kind == "condition" and not getattr(guard.node, "orelse", None)
            if is_alone and _steps_ddp(facts, call):
                yield Report(
                    call, "the optimizer steps on some ranks only: the weights of the ranks differ from here on"
                )


def _steps_ddp(facts: Facts, step: ast.Call) -> bool:
    """True if the optimizer got the parameters of a DDP wrapper, or of the model that was wrapped."""
    assert isinstance(step.func, ast.Attribute)
    wrapped = {ast.dump(wrap.args[0]) for wrap in facts.wraps if wrap.args}
    for _, made in facts.program.made_by(step.func.value):
        for each in ast.walk(made.args[0]) if made.args else ():
            if isinstance(each, ast.Attribute) and each.attr == "parameters":
                return facts.is_ddp(each.value) or ast.dump(each.value) in wrapped
    return False


@rule("DDP505")
def accumulation_synced(facts: Facts) -> Iterator[Report]:
    """Gradients are accumulated over micro-batches, and DDP exchanges them after each."""
    program = facts.program
    if not facts.wraps:
        return
    for loop in facts.step_loops:
        calls = list(program.calls_inside(loop))
        if any("no_sync" in text or "require_backward_grad_sync" in text for text in _functions_of(facts, loop, calls)):
            continue
        steps = [call for call in calls if is_optimizer_step(call)]
        counted = all(is_counted(facts, each, loop) for each in steps) if steps else _is_stepped_after(facts, loop)
        backwards = [call for call in calls if getattr(call.func, "attr", "") == "backward"]
        free = [call for call in backwards if not is_counted(facts, call, loop)]
        if counted and free and facts.trains_ddp(loop):
            yield Report(
                free[0], "gradients are exchanged after every micro-batch: use `model.no_sync()` for all but the last"
            )


def _is_stepped_after(facts: Facts, loop: Loop) -> bool:
    """True if the loop around `loop` steps the optimizer once after all iterations of `loop`.

    Not with a static graph, where `no_sync` is not supported, and not if each iteration reads its gradients.
    """
    if "static_graph" in facts.program.text or ".grad" in ast.unparse(loop):
        return False
    outer = facts.program.loops_of(loop)[:1]
    calls = [call for each in outer for call in facts.program.inside(each, ast.Call)]
    steps = [call for call in calls if isinstance(call, ast.Call) and is_optimizer_step(call)]
    return bool(steps) and all(call.lineno > (loop.end_lineno or 0) for call in steps)


def _functions_of(facts: Facts, loop: Loop, calls: Sequence[ast.Call]) -> Iterator[str]:
    """Yield the text of the functions that `loop` and `calls` are in."""
    functions = {facts.program.function_of(each) for each in (loop, *calls)}
    yield from (ast.unparse(each) for each in functions if each is not facts.program.tree)
    if facts.program.tree in functions:
        yield ast.unparse(loop)
        yield from (ast.unparse(each) for each in facts.program.tree.body if not isinstance(each, _DEFINITIONS))


def is_optimizer_step(call: ast.Call) -> bool:
    """Return True for ``optimizer.step()`` and ``scaler.step(optimizer)``."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return False
    text = ast.unparse(call.func.value).lower()
    return "opt" in text or "scaler" in text


def is_counted(facts: Facts, node: ast.AST, loop: Loop) -> bool:
    """Return True if `node` is under a condition on the number of the batch, as in ``(i + 1) % k == 0``."""
    return any(map(_counts_batches, _conditions_within(facts, node, loop)))


def _conditions_within(facts: Facts, node: ast.AST, loop: Loop) -> Iterator[ast.expr]:
    for each in facts.program.ancestors(node):
        if each is loop:
            return
        if isinstance(each, ast.If):
            yield each.test


def _counts_batches(test: ast.expr) -> bool:
    return any(isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod) for each in ast.walk(test))


@rule("DDP328")
def no_sync_around_backward(facts: Facts) -> Iterator[Report]:
    """`no_sync()` around backward alone, which has no effect."""
    program = facts.program
    for call in program.calls_to(".no_sync"):
        block = program.parents.get(program.parents[call])
        assert isinstance(call.func, ast.Attribute)
        if not isinstance(block, ast.With) or not facts.is_ddp(call.func.value):
            continue
        inside = [each for each in program.calls_inside(block) if each is not call]
        has_backward = any(getattr(each.func, "attr", "") == "backward" for each in inside)
        has_forward = any(each in facts.forwards for each in inside)
        unknown = [each for each in inside if not program.name_of(each) and isinstance(each.func, ast.Name)]
        if has_backward and not has_forward and not unknown:
            yield Report(block, "`no_sync()` must include the forward pass: around backward alone it has no effect")


@rule("DDP502", is_fixable=True)
def needless_find_unused(facts: Facts) -> Iterator[Report]:
    """`find_unused_parameters=True` for a model whose forward uses every layer."""
    for call in facts.wraps:
        if is_constant(argument(call, -1, "find_unused_parameters"), True) and call.args:
            classes = list(facts.program.instances(call.args[0]))
            if len(classes) == 1 and _uses_every_layer(classes[0]):
                yield Report(
                    call, "the forward uses every layer: `find_unused_parameters=True` only costs a search per step",
                    ("remove-argument", "find_unused_parameters"),
                )  # fmt: skip


def _uses_every_layer(model: ast.ClassDef) -> bool:
    methods = {each.name: each for each in model.body if isinstance(each, ast.FunctionDef)}
    forward, init = methods.get("forward"), methods.get("__init__")
    if forward is None or init is None or set(methods) != {"forward", "__init__"}:
        return False
    if [ast.unparse(base).rpartition(".")[2] for base in model.bases] != ["Module"]:
        return False
    branches = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.Return, ast.BoolOp, ast.Match)
    if sum(isinstance(each, branches) for each in ast.walk(forward)) != 1 or "no_grad" in ast.unparse(forward):
        return False
    made = [
        t.attr for a in ast.walk(init) if isinstance(a, ast.Assign) for t in a.targets if isinstance(t, ast.Attribute)
    ]
    used = {e.attr for e in ast.walk(forward) if isinstance(e, ast.Attribute) and isinstance(e.value, ast.Name)}
    simple = not any(isinstance(each, (ast.For, ast.If)) or _registers(each) for each in ast.walk(init))
    return bool(made) and set(made) <= used and simple


def _registers(node: ast.AST) -> bool:
    names = (
        "ModuleList",
        "ModuleDict",
        "register_parameter",
        "add_module",
        "setattr",
        "requires_grad_",
        "requires_grad",
    )
    return getattr(node, "attr", getattr(node, "id", "")) in names


@rule("DDP408")
def batch_norm_unsynced(facts: Facts) -> Iterator[Report]:
    """BatchNorm over fewer than 16 samples on each rank, without SyncBatchNorm."""
    program = facts.program
    if "SyncBatchNorm" in program.text or not facts.wraps or "cuda" not in program.text:
        return
    sizes = [
        size
        for loop in facts.step_loops
        if facts.trains_ddp(loop)
        for loader in facts.loaders_of(loop)
        for size in [_constant_size(facts, argument(loader, 1, "batch_size"))]
    ]
    if not sizes or any(size is None or size >= _MIN_SAMPLES for size in sizes):
        return
    for wrap in facts.wraps:
        if wrap.args and _has_batch_norm(facts, wrap.args[0]):
            yield Report(wrap, f"BatchNorm normalises {sizes[0]} samples on each rank: convert it to SyncBatchNorm")


def _has_batch_norm(facts: Facts, model: ast.expr) -> bool:
    """True if the file creates `model` with BatchNorm layers, directly or through its functions and classes."""
    program = facts.program
    done: set[ast.AST] = set()
    stack: list[ast.AST] = [*program.instances(model), *program.trace(model)]
    while stack:
        each = stack.pop()
        if each in done or isinstance(each, ast.Module):
            continue
        done.add(each)
        calls = [node for node in ast.walk(each) if isinstance(node, ast.Call)]
        names = [program.name_of(call) for call in calls]
        if any(name.rpartition(".")[2] in _BATCH_NORMS or _MODELS_WITH_NORM.match(name) for name in names):
            return True
        for call in calls:
            stack += [*program.callees(call), *program.instances(call)]
    return False


def _constant_size(facts: Facts, node: ast.expr | None) -> int | None:
    values = [each for each in facts.program.trace(node) if isinstance(each, ast.Constant)] if node is not None else []
    return values[0].value if len(values) == 1 and isinstance(values[0].value, int) else None
