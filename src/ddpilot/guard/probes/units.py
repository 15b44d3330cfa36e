# SPDX-License-Identifier: Apache-2.0
"""Which parameters are compared with which of the other ranks: those of one optimizer in one DDP model, or in none."""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.ddp_model import DdpModel
from ddpilot.guard.probes.fingerprint import Fingerprinter, is_plain
from ddpilot.guard.probes.groups import sequence_number
from ddpilot.guard.probes.parameter_names import find_parameter_names

FIRST_STEPS = 5
LOCAL_STEPS = 16
"""So many may be local on purpose: what goes on like that is known by then."""
STRIDES = (25, 5, 1)
"""Every so manieth step is checked, by how long steps take: each of these a part of the one before, so that ranks which
measure a little differently still meet."""
INTERVAL_S = 0.75
_MAX_COST = 0.02
_MAX_PATTERNS = 16
_MAX_OPTIMIZERS = 64
_MAX_TENSORS = 8192
_MAX_RATES = 8


class Unit:
    """Parameters of one optimizer that belong to `model`, or to no DDP model; `key` is the same on all ranks."""

    def __init__(self, *, number: int, key: list[Any], model: DdpModel | None) -> None:
        self.number = number
        self.key = key
        self.model = model
        self.fingerprinter = Fingerprinter([])
        self.digest = 0
        self._num_steps = 0
        self._num_local_steps = 0
        self._position = 0
        self._seen: set[str] = set()
        self._due_at = 0  # a number of steps
        self._checked_at = 0
        self._checked_s = 0.0

    def advance(self) -> tuple[int, str, bool]:
        """Count a step: its number, what led to it, and whether it is to be checked. Alike on all ranks."""
        events = ""
        if self.model is None:
            self._num_local_steps += 1
            count = self._num_local_steps
        else:
            reductions = self.model.reductions
            events = reductions.since(self._position)
            self._position = reductions.position
            # Forwards of DDP are as many on all ranks; steps are not where one was forgotten.
            self._num_local_steps += "F" not in events
            count = reductions.num_forwards + self._num_local_steps
        self._num_steps += 1
        is_new = events not in self._seen and len(self._seen) < _MAX_PATTERNS
        if is_new:
            self._seen.add(events)
        is_due = is_new or self._num_steps <= FIRST_STEPS or self._num_steps == LOCAL_STEPS or count >= self._due_at
        if is_due:
            self._due_at = _next_multiple(count, STRIDES[0])
        return count, events, is_due

    def checked(self, count: int, cost_s: float) -> None:
        """A check at step `count` ended just now, and took `cost_s`: find when the next one is due."""
        now_s = time.monotonic()
        step_s = (now_s - self._checked_s) / max(count - self._checked_at, 1)
        least_s = cost_s / _MAX_COST
        self._checked_at, self._checked_s = count, now_s
        enough = [stride for stride in STRIDES if stride * step_s >= least_s] or [STRIDES[0]]
        stride = next((stride for stride in enough if stride * step_s <= INTERVAL_S), enough[-1])
        self._due_at = _next_multiple(count, stride)


class UnitBook:
    """The units of each optimizer, and the notes on its steps. `models`: the DDP models that there are now."""

    def __init__(self, notes: Notes, models: Callable[[], list[DdpModel]]) -> None:
        self._notes = notes
        self._models = models
        # By id. A WeakKeyDictionary looks things up in Python, which costs every step.
        self._units: dict[int, tuple[weakref.ref[Optimizer], list[Unit]]] = {}
        self._dropped: list[DdpModel] = []  # whose wrapper is gone, without one forward through it
        self._num_units = 0
        self._era = ""
        self._num_of_key: dict[str, int] = {}

    def clear(self) -> None:
        """Begin anew."""
        self._units.clear()
        self._num_of_key.clear()

    def drop(self, models: Iterable[DdpModel]) -> None:
        """The wrappers of `models` are gone."""
        unused = [model for model in models if not {*"Ff"} & {*model.reductions.since(0)}]
        self._dropped = [model for model in (*self._dropped, *unused) if model.first() is not None][-_MAX_OPTIMIZERS:]

    def step(self, optimizer: Optimizer, era: str) -> None:
        """Note that `optimizer` is about to take a step, in the default group that `era` names."""
        self._era = era
        held = self._units.get(id(optimizer))
        if held is None or held[0]() is not optimizer:
            held = self._add(optimizer)
            if held is None:
                return
        units = held[1]
        is_planned = not units
        for unit in units:
            is_planned = is_planned or (unit.model is not None and unit.model.find() is None)
        if is_planned:
            self._plan(optimizer, units)
        is_planned = False
        for unit in tuple(units):
            count, events, is_due = unit.advance()
            if is_due and not is_planned:
                is_planned = True
                self._plan(optimizer, units)
            if unit.fingerprinter.parameters:
                self._note(unit, optimizer, count, events, is_due)
        for unit in units:
            if unit.model is not None:
                unit.model.reductions.step()

    def _add(self, optimizer: Optimizer) -> tuple[weakref.ref[Optimizer], list[Unit]] | None:
        if len(self._units) >= _MAX_OPTIMIZERS:
            return None
        key, units = id(optimizer), self._units
        held = units[key] = weakref.ref(optimizer, lambda _: units.pop(key, None)), []
        return held

    def _note(self, unit: Unit, optimizer: Optimizer, count: int, events: str, is_due: bool) -> None:
        model = unit.model
        number = sequence_number(model.find().process_group if model else dist.group.WORLD)
        if not is_due and model is not None and not (model.why_silent or model.why_local or model.without_effect):
            self._notes.write_step(unit.number, count, number, events)
            return
        values: dict[str, Any] = {"u": unit.number, "n": count, "s": number}
        if model is not None:
            values["e"] = events
            if is_due:
                model.look_at_hooks()
            if model.why_silent:
                values["silent"] = model.why_silent
            if model.why_local:
                values |= {"why": model.why_local, "at": model.why_site, "site": self._notes.site()}
            if model.without_effect:
                values["vain"], model.without_effect = model.without_effect, {}
        if is_due:
            begun = time.monotonic()
            values["f"] = unit.fingerprinter.take()
            values["lr"] = _rates_of(optimizer)
            unit.checked(count, time.monotonic() - begun)
        self._notes.write("step", **values)

    def _plan(self, optimizer: Optimizer, units: list[Unit]) -> None:
        """Sort the optimizer's parameters into units, and note those that are new or have changed."""
        models = self._models()
        sorted_in: dict[int, list[tuple[str, Tensor, bool]]] = {}
        by_number = {model.number: model for model in models}
        names = {id(parameter): (model.number, name, False) for model in models for parameter, name in _late(model)}
        names |= {key: (model.number, name, True) for model in models for key, name in model.names.items()}
        ignored = {key for model in models for key in model.ignored}
        place = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                place += 1
                number, name, is_reduced = names.get(
                    id(parameter), (0, f"parameter {place} {list(parameter.shape)}", False)
                )
                if id(parameter) not in ignored and parameter.requires_grad and is_plain(parameter):
                    sorted_in.setdefault(number, []).append((name, parameter, is_reduced))
        units[:] = [unit for unit in units if unit.model is None or unit.model.number in by_number]
        for number, members in sorted_in.items():
            if number and by_number[number].is_alone:
                continue
            found = [unit for unit in units if (unit.model.number if unit.model else 0) == number]
            unit = found[0] if found else self._new_unit(by_number.get(number), members)
            if not found:
                units.append(unit)
            self._describe(unit, optimizer, members[:_MAX_TENSORS])

    def _new_unit(self, model: DdpModel | None, members: list[tuple[str, Tensor, bool]]) -> Unit:
        if model is not None:
            key = ["ddp", model.group, model.ordinal]
        else:
            site = self._notes.site()
            shapes = zlib.crc32(repr([list(parameter.shape) for _, parameter, _ in members]).encode())
            key = ["free", f"{self._era}/{shapes}", f"{site.get('file')}:{site.get('line')}"]
        text = repr(key)
        ordinal = self._num_of_key[text] = self._num_of_key.get(text, -1) + 1
        self._num_units += 1
        return Unit(number=self._num_units, key=[*key, ordinal], model=model)

    def _describe(self, unit: Unit, optimizer: Optimizer, members: list[tuple[str, Tensor, bool]]) -> None:
        parameters = [parameter for _, parameter, _ in members]
        names = [name for name, _, _ in members]
        late = [place for place, (_, _, is_reduced) in enumerate(members) if not is_reduced] if unit.model else []
        moved = _moved(unit.model, members)
        if len(parameters) != len(unit.fingerprinter.parameters) or any(
            new is not old for new, old in zip(parameters, unit.fingerprinter.parameters, strict=True)
        ):
            # What a program that averages by itself forgets is mostly what comes last, or first.
            ends = () if unit.model else {*range(len(members))[:2], *range(len(members))[-2:]}
            unit.fingerprinter = Fingerprinter(parameters, always=late or ends)
        digest = zlib.crc32(repr((names, late, moved)).encode())
        if digest == unit.digest:
            return
        unit.digest = digest
        self._notes.write(
            "unit",
            u=unit.number,
            key=unit.key,
            names=names,
            late=late,
            moved=moved,
            sizes=[] if unit.model else [parameter.numel() for parameter in parameters],
            called=[] if unit.model else self._names_of(optimizer, members),
            largest=max(parameter.numel() for parameter in parameters),
            site=self._notes.site(),
            made=unit.model.site if unit.model else {},
            dropped={} if unit.model else self._find_dropped(parameters),
        )

    def _find_dropped(self, parameters: list[Tensor]) -> dict[str, Any]:
        """Where a model with some of `parameters` was wrapped, of which the wrapper is gone."""
        found = (model.site for model in self._dropped if any(model.first() is one for one in parameters))
        return next(found, {})

    def _names_of(self, optimizer: Optimizer, members: list[tuple[str, Tensor, bool]]) -> list[str]:
        found = find_parameter_names(optimizer, self._notes.user_frame())
        return [found.get(id(parameter), name) for name, parameter, _ in members]


def _next_multiple(count: int, stride: int) -> int:
    return (count // stride + 1) * stride


def _rates_of(optimizer: Optimizer) -> list[float]:
    """The learning rates of its first groups; none of a capturable optimizer, which would have to be waited for."""
    rates = [group.get("lr") for group in optimizer.param_groups[:_MAX_RATES]]
    return [float(rate) for rate in rates if isinstance(rate, int | float)]


def _late(model: DdpModel) -> list[tuple[Tensor, str]]:
    """Parameters that the module has got since it was wrapped, or that became trainable."""
    known = model.names.keys() | model.ignored
    return [(parameter, name) for name, parameter in model.current_parameters() if id(parameter) not in known]


def _moved(model: DdpModel | None, members: list[tuple[str, Tensor, bool]]) -> list[str]:
    """Parameters that have another device or dtype than when the model was wrapped."""
    if model is None:
        return []
    return [
        f"{name}: {' on '.join(map(str, born))}, now {parameter.dtype} on {parameter.device}"
        for name, parameter, _ in members
        if (born := model.born.get(id(parameter))) and born != (parameter.dtype, parameter.device)
    ][:5]
