# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: GradScaler and autocast."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpilot.lint.rule import Facts, Report, rule

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
