# SPDX-License-Identifier: Apache-2.0
"""Decide which parameters are compared between ranks, and note the steps of each such set.

A set holds the parameters of one optimizer that belong to one DDP model, or to none.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from ddpilot.guard.notes import (
    LOCAL_STEPS,
    Fingerprint,
    FingerprintNote,
    LastStepNote,
    ParameterSetNote,
    Site,
    StepNote,
    SyncedNote,
)
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.parameters.ddp_model import DdpModel
from ddpilot.guard.probes.parameters.fingerprint import (
    Fingerprinter,
    LastCopy,
    LastWindows,
    PendingFingerprint,
    is_plain,
)
from ddpilot.guard.probes.parameters.parameter_names import find_parameter_names
from ddpilot.guard.probes.process_groups import sequence_number
from ddpilot.record.accelerator import HostCopies, is_capturing

FIRST_STEPS = 5
STRIDES = (25, 5, 1)
"""Check every 25th, every 5th or every step, depending on step time. Each stride divides the one before, so ranks whose
timings differ slightly still check the same steps."""
INTERVAL_S = 0.75
_MAX_COST = 0.02
_MAX_PATTERNS = 16
_MAX_OPTIMIZERS = 64
_MAX_TENSORS = 8192
_MAX_RATES = 8
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Learning rates in the groups of an optimizer: its own, and those that torch's schedules add."""
_MIN_RANDOM_SEED = 1 << 32
"""The seed that torch starts with is random and almost never below this; those that programs set are."""
_BUSY_S = 0.5
"""How long the last steps' notes wait for a busy GPU, in seconds."""


class ParameterSet:
    """Parameters of one optimizer that belong to `model`, or to no DDP model. `key` is equal on all ranks."""

    def __init__(self, *, number: int, key: list[Any], model: DdpModel | None) -> None:
        self.number = number
        self.key = key
        self.model = model
        self.fingerprinter = Fingerprinter([])
        self.windows: LastWindows | None = None
        """Windows of the parameters; None if none can be copied in part."""
        self.windows_at = 0
        """Number of the step before which `windows` were copied; 0 if unknown, or if that is noted."""
        self.described: tuple[list[str], list[int], list[str]] | None = None
        """Names, and the late and moved ones of them, as they were last noted."""
        self.count = 0
        """Number of the newest step, equal on all ranks."""
        self.events = ""
        """Forwards and backwards before that step."""
        self._num_steps = 0
        self._num_local_steps = 0
        self._position = 0
        self._seen: set[str] = set()
        self._due_at = 0  # a step number
        self._checked_at = 0
        self._checked_s = 0.0

    def is_next_due(self) -> bool:
        """True if the step that starts now should be checked, before its events are all known. See `advance`."""
        count = self._num_local_steps + 1 + (self.model.reductions.num_forwards if self.model is not None else 0)
        return self._is_due(self._num_steps + 1, count)

    def _is_due(self, num_steps: int, count: int) -> bool:
        return num_steps <= FIRST_STEPS or num_steps == LOCAL_STEPS or count >= self._due_at

    def advance(self, is_due: bool | None = None) -> bool:
        """Count a step. Returns True if it should be checked; equal on all ranks.

        `is_due`: the result of `is_next_due` at the start of the step.
        """
        num_forwards = 0
        if self.model is not None:
            reductions = self.model.reductions
            self.events = reductions.since(self._position)
            self._position = reductions.position
            num_forwards = reductions.num_forwards
        # All ranks have the same number of DDP forwards, but not of steps if one rank skips one.
        self._num_local_steps += "F" not in self.events
        self.count = num_forwards + self._num_local_steps
        self._num_steps += 1
        is_new = self.events not in self._seen and len(self._seen) < _MAX_PATTERNS
        if is_new:
            self._seen.add(self.events)
        if is_due is None:
            is_due = is_new or self._is_due(self._num_steps, self.count)
        if is_due:
            self._due_at = _next_multiple(self.count, STRIDES[0])
        return is_due

    def checked(self, cost_s: float) -> None:
        """Schedule the next check after one at the newest step that ended now and took `cost_s` seconds."""
        now_s = time.monotonic()
        step_s = (now_s - self._checked_s) / max(self.count - self._checked_at, 1)
        least_s = cost_s / _MAX_COST
        self._checked_at, self._checked_s = self.count, now_s
        enough = [stride for stride in STRIDES if stride * step_s >= least_s] or [STRIDES[0]]
        stride = next((stride for stride in enough if stride * step_s <= INTERVAL_S), enough[-1])
        self._due_at = _next_multiple(self.count, stride)


Sets = dict[DdpModel | None, ParameterSet]
"""The parameter sets of one optimizer, by model."""


@dataclass
class _Known:
    """An optimizer and its parameter sets."""

    optimizer: weakref.ref[Optimizer]
    sets: Sets = field(default_factory=dict)
    num_idle: int = 0
    """Number of steps without a parameter set."""
    newest_model: DdpModel | None = None
    """The newest DDP model when its parameters were last sorted into sets."""


@dataclass
class _Part:
    """One parameter set in a step that is in progress."""

    parameter_set: ParameterSet
    is_due: bool
    seq: int
    """Number of collectives that its group had started when the step started."""
    pending: list[PendingFingerprint]
    """If it is checked: the fingerprint, and that of the gradients after the closure."""
    cost_s: float


@dataclass
class OpenStep:
    """A step that is in progress. With a closure, the backward that computes its gradients is still to come."""

    optimizer: Optimizer
    sets: Sets
    parts: list[_Part]
    has_closure: bool


class ParameterSets:
    """The parameter sets of each optimizer, and notes on its steps. `models` returns the current DDP models."""

    def __init__(self, notes: Notes, models: Callable[[], list[DdpModel]]) -> None:
        self._notes = notes
        self._models = models
        # By id: a WeakKeyDictionary does lookups in Python, which would cost time in every step.
        self._known: dict[int, _Known] = {}
        self._dropped: list[DdpModel] = []  # models whose wrapper was freed without a forward
        self._num_sets = 0
        self._generation = ""
        self._num_of_key: dict[str, int] = {}
        self._last_steps: deque[tuple[int, int, LastCopy]] = deque(maxlen=_MAX_OPTIMIZERS)
        """Not noted yet: set, step and copy. Optimizer and model may have been freed."""
        self._copies = HostCopies()
        self._pending: deque[tuple[int, int, list[PendingFingerprint]]] = deque()  # sets, their steps, and fingerprints
        self._pid = os.getpid()

    def clear(self) -> None:
        """Discard all sets."""
        self.note_last_steps()
        self._known.clear()
        self._num_of_key.clear()

    def note_last_steps(self) -> None:
        """Note, for each set, its parameters before the newest step, unless already noted.

        Called when no step may follow: at the end of a cell, of the group, of the program.
        """
        if os.getpid() != self._pid:
            return
        for known in tuple(self._known.values()):
            self._keep_last(known.sets.values())
        until_s = time.monotonic() + _BUSY_S
        while self._pending and time.monotonic() < until_s:
            self._write_arrived()
            time.sleep(0.001)
        while self._last_steps:
            number, count, copy = self._last_steps.popleft()
            fingerprint = copy.fingerprint(until_s)
            if fingerprint is not None:
                note = LastStepNote(parameter_set=number, step=count, places=copy.places, fingerprint=fingerprint)
                self._notes.write("last_step", note)

    def _keep_last(self, sets: Iterable[ParameterSet]) -> None:
        for parameter_set in sets:
            copy = parameter_set.windows.taken() if parameter_set.windows is not None else None
            if copy is not None and parameter_set.windows_at:
                self._last_steps.append((parameter_set.number, parameter_set.windows_at, copy))
            parameter_set.windows_at = 0

    def drop(self, models: Iterable[DdpModel]) -> None:
        """Handle `models` whose wrappers have been freed."""
        unused = [model for model in models if not {*"Ff"} & {*model.reductions.since(0)}]
        self._dropped = [model for model in (*self._dropped, *unused) if model.first() is not None][-_MAX_OPTIMIZERS:]

    def begin_step(self, optimizer: Optimizer, generation: str, *, has_closure: bool) -> OpenStep:
        """Read what `optimizer` is about to step, in the default group named `generation`; `end_step` notes it.

        With a closure, parameters are read before the optimizer may move them to evaluate it, and gradients after it.
        """
        self._write_arrived()
        sets, is_planned = self._sets_of(optimizer, generation)
        opened = OpenStep(optimizer, sets, [], has_closure)
        for parameter_set in tuple(sets.values()):
            is_due = parameter_set.is_next_due() if has_closure else parameter_set.advance()
            if is_due and not is_planned:
                is_planned = True
                self._plan(optimizer, sets)
            parameter_set.windows_at = 0
            if parameter_set.windows is not None:
                parameter_set.windows.copy()
            begun = time.monotonic()
            fingerprinter = parameter_set.fingerprinter
            pending = [fingerprinter.begin(self._copies)] if is_due and fingerprinter.parameters else []
            seq = _find_number(parameter_set.model)
            opened.parts.append(_Part(parameter_set, is_due, seq, pending, time.monotonic() - begun))
        return opened

    def look_at_gradients(self, opened: OpenStep) -> None:
        """Read the gradients after the closure has returned: the step uses them, unless it calls the closure again."""
        for part in opened.parts:
            begun = time.monotonic()
            fingerprinter = part.parameter_set.fingerprinter
            if part.pending:
                part.pending[1:] = [] if is_capturing() else [fingerprinter.begin(self._copies, only_gradients=True)]
            part.cost_s += time.monotonic() - begun

    def end_step(self, opened: OpenStep) -> None:
        """Note the step."""
        for part in opened.parts:
            if opened.has_closure:
                part.parameter_set.advance(part.is_due)
            if part.parameter_set.fingerprinter.parameters:
                self._note(part, opened.optimizer)
        for model in opened.sets:
            if model is not None:
                self._stepped(model)

    def _stepped(self, model: DdpModel) -> None:
        model.reductions.step()
        synced = model.synced
        if synced is not None:
            synced.step()
            if counts := synced.counts:
                note = SyncedNote(least=min(counts), most=max(counts), num_bytes=synced.num_bytes, site=synced.site)
                self._notes.write("synced", note)
            if synced.is_over:
                model.synced = None

    def _sets_of(self, optimizer: Optimizer, generation: str) -> tuple[Sets, bool]:
        """Return the sets of `optimizer`, and True if its parameters have just been sorted into them."""
        self._generation = generation
        known = self._known.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer:
            known = self._add(optimizer)
            if known is None:
                return {}, True
        sets = known.sets
        is_planned = False
        if not sets:
            # Sorting takes as long as a step of a small model. As long as nothing can be compared, it is repeated only
            # with a new DDP model, and else at exponentially growing intervals, at the same steps on all ranks.
            newest = next(reversed(self._models()), None)
            known.num_idle += 1
            is_planned = newest is not known.newest_model or not known.num_idle & (known.num_idle - 1)
            known.newest_model = newest
        if is_planned or any(model is not None and model.find() is None for model in sets):
            is_planned = True
            self._plan(optimizer, sets)
        return sets, is_planned

    def _add(self, optimizer: Optimizer) -> _Known | None:
        if len(self._known) >= _MAX_OPTIMIZERS:
            return None
        key, all_known, keep_last, is_exiting = id(optimizer), self._known, self._keep_last, sys.is_finalizing

        def forget(_: weakref.ref[Optimizer]) -> None:
            # At the end of the interpreter the names of modules, which `keep_last` uses, are None.
            if not is_exiting() and (freed := all_known.pop(key, None)):
                keep_last(freed.sets.values())

        known = all_known[key] = _Known(weakref.ref(optimizer, forget))
        return known

    def _note(self, part: _Part, optimizer: Optimizer) -> None:
        parameter_set, is_due, model = part.parameter_set, part.is_due, part.parameter_set.model
        number, count, events = parameter_set.number, parameter_set.count, parameter_set.events
        parameter_set.windows_at = count
        if not is_due and model is not None and not (model.why_silent or model.why_local or model.without_effect):
            self._notes.write_step(number, count, part.seq, events)
            return
        note: StepNote = {"parameter_set": number, "step": count, "seq": part.seq, "events": events}
        if model is not None:
            if is_due:
                model.look_at_hooks()
            if model.why_silent:
                note["why_silent"] = model.why_silent
            if model.why_local:
                note["why_local"], note["local_site"] = model.why_local, model.why_site
                note["site"] = self._notes.site()
            if model.without_effect:
                note["in_vain"], model.without_effect = model.without_effect, {}
        if is_due:
            begun = time.monotonic()
            if all(each.has_arrived() for each in part.pending):
                note["fingerprint"] = _join(part.pending)
            else:
                note["is_copying"] = True
                self._pending.append((number, count, part.pending))
            note["rates"] = _rates_of(optimizer)
            parameter_set.checked(part.cost_s + time.monotonic() - begun)
        self._notes.write("step", note)

    def _write_arrived(self) -> None:
        """Note the fingerprints that have arrived from their devices, each with the number of its step."""
        while self._pending and all(each.has_arrived() for each in self._pending[0][2]):
            number, count, pending = self._pending.popleft()
            note = FingerprintNote(parameter_set=number, step=count, fingerprint=_join(pending))
            self._notes.write("fingerprint", note)

    def _plan(self, optimizer: Optimizer, sets: Sets) -> None:
        """Sort the optimizer's parameters into sets, and note sets that are new or have changed."""
        live = {model: ddp for model in self._models() if (ddp := model.find()) is not None}
        known: dict[int, tuple[DdpModel | None, str, bool]] = {}
        for model, ddp in live.items():
            known |= {id(parameter): (model, name, False) for name, parameter in ddp.module.named_parameters()}
        for model in live:
            known |= {key: (model, name, True) for key, name in model.names.items()}
        ignored = {key for model in live for key in model.ignored}
        members_of: dict[DdpModel | None, list[tuple[str, Tensor, bool]]] = {}
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for place, parameter in enumerate(parameters, 1):
            unnamed = (None, f"parameter {place} {list(parameter.shape)}", False)
            owner, name, is_reduced = known.get(id(parameter), unnamed)
            if id(parameter) not in ignored and parameter.requires_grad and is_plain(parameter):
                members_of.setdefault(owner, []).append((name, parameter, is_reduced))
        freed = [model for model in sets if model is not None and model not in live]
        self._keep_last([sets.pop(model) for model in freed])
        for owner, members in members_of.items():
            # Without a `Parameter`, they are not of a module that DDP could wrap: inputs or latents of this rank.
            may_be_wrapped = any(isinstance(parameter, Parameter) for _, parameter, _ in members)
            if may_be_wrapped if owner is None else not owner.is_alone:
                if owner not in sets:
                    sets[owner] = self._new_set(owner, members)
                self._describe(sets[owner], optimizer, members[:_MAX_TENSORS])

    def _new_set(self, model: DdpModel | None, members: list[tuple[str, Tensor, bool]]) -> ParameterSet:
        if model is not None:
            key = ["ddp", model.group, model.ordinal]
        else:
            site = self._notes.site()
            shapes = zlib.crc32(repr([list(parameter.shape) for _, parameter, _ in members]).encode())
            key = ["free", f"{self._generation}/{shapes}", f"{site.get('file')}:{site.get('line')}"]
        text = repr(key)
        ordinal = self._num_of_key[text] = self._num_of_key.get(text, -1) + 1
        self._num_sets += 1
        return ParameterSet(number=self._num_sets, key=[*key, ordinal], model=model)

    def _describe(
        self, parameter_set: ParameterSet, optimizer: Optimizer, members: list[tuple[str, Tensor, bool]]
    ) -> None:
        model = parameter_set.model
        parameters = [parameter for _, parameter, _ in members]
        names = [name for name, _, _ in members]
        late = [place for place, (_, _, is_reduced) in enumerate(members) if model and not is_reduced]
        moved = _moved(model, members)
        if [*map(id, parameters)] != [*map(id, parameter_set.fingerprinter.parameters)]:
            # A program that averages gradients itself forgets mostly the last parameters, or the first.
            ends = () if model else {*range(len(members))[:2], *range(len(members))[-2:]}
            parameter_set.fingerprinter = Fingerprinter(parameters, always=late or ends)
            parameter_set.windows = LastWindows.of(parameters)
            parameter_set.windows_at = 0
        if (names, late, moved) == parameter_set.described:
            return
        parameter_set.described = (names, late, moved)
        note = ParameterSetNote(
            parameter_set=parameter_set.number,
            key=parameter_set.key,
            names=names,
            late=late,
            moved=moved,
            sizes=[] if model else [parameter.numel() for parameter in parameters],
            called=[] if model else self._names_of(optimizer, members),
            largest=max(parameter.numel() for parameter in parameters),
            site=self._notes.site(),
            made=model.site if model else {},
            dropped={} if model else self._find_dropped(parameters),
            is_seeded=torch.initial_seed() < _MIN_RANDOM_SEED,
            settings=_settings_of(optimizer),
        )
        self._notes.write("parameter_set", note)

    def _find_dropped(self, parameters: list[Tensor]) -> Site:
        """Return the line that wrapped a model with some of `parameters` if its wrapper has been freed; else {}."""
        found = (model.site for model in self._dropped if any(model.first() is one for one in parameters))
        return next(found, {})

    def _names_of(self, optimizer: Optimizer, members: list[tuple[str, Tensor, bool]]) -> list[str]:
        found = find_parameter_names(optimizer, self._notes.user_frame())
        return [found.get(id(parameter), name) for name, parameter, _ in members]


def _join(pending: list[PendingFingerprint]) -> Fingerprint:
    """Return a fingerprint whose parts have all arrived, with the gradients of the last part."""
    fingerprint = pending[0].fingerprint()
    for gradients in pending[1:]:
        fingerprint["g"] = gradients.fingerprint()["g"]
    return fingerprint


def _next_multiple(count: int, stride: int) -> int:
    return (count // stride + 1) * stride


def _rates_of(optimizer: Optimizer) -> list[float]:
    """Learning rates of the first groups, without those that are tensors: reading one would wait for the device."""
    rates = [group.get("lr") for group in optimizer.param_groups[:_MAX_RATES]]
    return [float(rate) for rate in rates if isinstance(rate, int | float)]


def _settings_of(optimizer: Optimizer) -> dict[str, str]:
    """The class, and by name the settings of the first groups that are numbers, except for learning rates."""
    shown: dict[str, list[str]] = {}
    for group in optimizer.param_groups[:_MAX_RATES]:
        for name, value in group.items():
            values = value if isinstance(value, tuple) else (value,)
            if name not in _RATES and all(isinstance(each, int | float) for each in values):
                shown.setdefault(name, []).append(repr(value))
    return {"optimizer": type(optimizer).__name__} | {
        name: values[0] if len(set(values)) == 1 else ", ".join(values) for name, values in shown.items()
    }


def _find_number(model: DdpModel | None) -> int:
    """Number of collectives started by the group of `model`, or by the default group; -1 if not known."""
    if model is None:
        return sequence_number(dist.group.WORLD)
    return sequence_number(getattr(model.find(), "process_group", None))


def _moved(model: DdpModel | None, members: list[tuple[str, Tensor, bool]]) -> list[str]:
    """Describe up to 5 parameters whose device or dtype has changed since the model was wrapped."""
    if model is None:
        return []
    return [
        f"{name}: {' on '.join(map(str, born))}, now {parameter.dtype} on {parameter.device}"
        for name, parameter, _ in members
        if (born := model.born.get(id(parameter))) and born != (parameter.dtype, parameter.device)
    ][:5]
