# SPDX-License-Identifier: Apache-2.0
"""The state of one DDP model on this rank: forwards, backwards, and why gradients were not reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddpilot.guard.notes import Site, UnusedNote
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.parameters.bypass import BypassCalls
from ddpilot.guard.probes.process_groups import describe_group

_MAX_SAMPLES = 4
_HOOK_MODULES = ("torch.", "ddpilot.")
# These hooks leave gradients different between ranks on purpose.
_LOCAL_HOOKS = ("noop_hook", "post_localSGD_hook", "local_hook")


class DdpModel:
    """A model wrapped by `ddp`, to which it keeps no reference.

    `ordinal`: "<generation>/<index>", which DDP model of its group this is, counted from 0 in each generation of the
    default group.
    """

    def __init__(self, ddp: Any, *, ordinal: str) -> None:
        self.ordinal = ordinal
        self.is_alone = dist.get_world_size(ddp.process_group) < 2
        """True if this rank is alone in its process group: each rank trains its own model."""
        self.group = describe_group(ddp.process_group)
        self.reductions = BackwardTracker()
        self.site: Site = {}
        self.why_local = ""
        """Why the last gradients were not reduced; empty if they were."""
        self.why_site: Site = {}
        self.bypasses: BypassCalls | None = None
        """Finds calls past the wrapper; None until there has been one."""
        self.no_sync_site: Site = {}
        self.without_effect: Site = {}
        """The line of a backward inside `no_sync` whose forward was outside of it, so that `no_sync` had no effect."""
        self.why_silent = ""
        """Why its gradients may differ between ranks."""
        self.find: Callable[[], Any] = weakref.ref(ddp)
        """Returns the wrapper, or None once it has been freed, which can happen between two calls: call it once per
        use."""
        # DDP holds these parameters as long as it lives, so their ids are not reused.
        self.names = {
            id(parameter): name
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad and name not in ddp.parameters_to_ignore
        }
        self.ignored = {
            id(parameter) for name, parameter in ddp.module.named_parameters() if name in ddp.parameters_to_ignore
        }
        # Not kept alive: the program may continue to use the module of a wrapper that was deleted unused.
        trainable = [parameter for parameter in ddp.module.parameters() if id(parameter) in self.names]
        self.first: Callable[[], Any] = weakref.ref(trainable[0]) if trainable else _nothing
        """Returns the first trainable parameter, or None once it has been freed."""
        has_no_sync = not self.is_alone and not ddp.static_graph  # torch's `no_sync` fails with a static graph
        self.synced: SyncedBackwards | None = SyncedBackwards(trainable) if has_no_sync else None
        """Observes the first steps; None when that is finished."""
        self.born = {id(parameter): (parameter.dtype, parameter.device) for parameter in trainable}
        spread = range(0, len(trainable), -(-len(trainable) // _MAX_SAMPLES) or 1)
        self.gradient_state, self.has_changed_since = look_at_gradients([trainable[at] for at in spread])
        """`gradient_state` returns a state that a backward through the model changes; `has_changed_since` compares with
        it."""

    def look_at_hooks(self) -> None:
        """Do not report gradients that a communication hook or `join` may leave different between ranks."""
        ddp = self.find()
        if ddp is None:
            return
        if ddp._join_config.enable:
            self.why_silent = "join"
        for hook, _ in getattr(ddp, "_comm_hooks", ()):
            name = getattr(hook, "__name__", type(hook).__name__)
            if name in _LOCAL_HOOKS or not str(getattr(hook, "__module__", "")).startswith(_HOOK_MODULES):
                self.why_silent = f"hook {name}"


def _nothing() -> None:
    return None


_MAX_EVENTS = 32
RETAINED = "R"


class BackwardTracker:
    """Follows one model. A forward outside `no_sync` prepares DDP to reduce the next backward, and only that one.

    Events: ``F`` forward, ``f`` forward in `no_sync`, ``B`` backward, ``b`` backward in `no_sync`, ``R`` backward that
    retained its graph.
    """

    def __init__(self) -> None:
        self.num_forwards = 0
        """Forwards outside `no_sync`: equal on all ranks, since DDP's collectives belong to them."""
        self.position = 0
        """Number of events so far."""
        self._events = ""  # the newest events
        self._is_armed = False
        self._num_spare = 0  # forwards without a backward so far, besides the one that is reduced
        self._num_local = 0
        self._last_was_retained = False

    def forward(self, *, syncs: bool) -> None:
        """Count a forward that starts with gradients enabled."""
        self._events = (self._events + ("F" if syncs else "f"))[-_MAX_EVENTS:]
        self.position += 1
        if syncs:
            self.num_forwards += 1
            self._num_spare += self._is_armed
            self._is_armed = True
        else:
            self._num_local += 1

    def backward(self, *, syncs: bool, retains: bool) -> str:
        """Count a backward that changed the model's gradients. Returns why they were not reduced, or ""."""
        self._events = (self._events + (RETAINED if retains else "B" if syncs else "b"))[-_MAX_EVENTS:]
        self.position += 1
        was_retained, self._last_was_retained = self._last_was_retained, retains
        if self._is_armed:
            self._is_armed = False
            self._num_local = 0
            return ""
        if self._num_local:
            self._num_local -= 1
            return "no_sync" if not syncs else "forward in no_sync"
        if self._num_spare:
            self._num_spare -= 1
            return "two forwards"
        return "twice" if was_retained else "bypass"

    def step(self) -> None:
        """Count an optimizer step: earlier forwards without a backward are no longer expected to have one."""
        self._num_spare = self._num_local = 0
        self._last_was_retained = False

    def since(self, position: int) -> str:
        """Return the events from `position` on, at most the newest 32."""
        return self._events[position - self.position :] if position < self.position else ""


Looks = tuple[Callable[[], Any], Callable[[Any], bool]]


def look_at_gradients(parameters: Sequence[Tensor]) -> Looks:
    """Return two functions: one returns a state, the other compares with it and returns True if gradients have changed.

    They keep no reference to `parameters`.
    """
    references = [weakref.ref(parameter) for parameter in parameters]

    def state() -> list[tuple[int, int] | None]:
        found: list[tuple[int, int] | None] = []
        for reference in references:  # runs in every backward: a function or comprehension would double its time
            gradient = getattr(reference(), "grad", None)
            if gradient is None:
                found.append(None)
            else:  # a sparse gradient has no address
                found.append((id(gradient) if gradient.is_sparse else gradient.data_ptr(), gradient._version))
        return found

    def has_changed_since(before: list[tuple[int, int] | None]) -> bool:
        for reference, one in zip(references, before, strict=True):  # the first parameter mostly decides
            gradient = getattr(reference(), "grad", None)
            if gradient is None:
                if one is not None:
                    return True
            elif one != (id(gradient) if gradient.is_sparse else gradient.data_ptr(), gradient._version):
                return True
        return False

    return state, has_changed_since


NUM_STEPS = 8
"""Number of consecutive steps that have to accumulate this way before it is noted."""

_MAX_OTHERS = 3
_MAX_BACKWARDS = 1024


class SyncedBackwards:
    """Follows the first steps of one DDP model, until 3 steps have not accumulated, as in most programs.

    Only backwards at one line count: two lines are two losses. Gradients that are cleared, read or added in between do
    not accumulate.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self.num_bytes = sum(one.numel() * one.element_size() for one in parameters)
        self.is_over = False
        self._num_others = 0
        self._clear()
        self._nums: list[int] = []
        self.counts: list[int] = []
        """Backwards per step, once they are known."""
        self.site: Site = {}
        """Line of the last backward."""

    @property
    def is_nearly_known(self) -> bool:
        """True if the step after the next backward may be the last one that has to be observed."""
        return len(self._nums) == NUM_STEPS - 1 and not self._lines

    def _clear(self) -> None:
        self._lines: list[tuple[str, int]] = []
        self._adds_up = True
        self._left: Any = None

    def backward(self, site: Site, before: Any, after: Any, *, is_reduced: bool) -> None:
        """Count a backward at `site` with the gradient states before and after it, from `DdpModel.gradient_state`."""
        self.site = site
        if self._lines:
            self._adds_up &= before == self._left
        self._adds_up &= is_reduced and len(self._lines) < _MAX_BACKWARDS
        self._lines.append((site.get("file", ""), site.get("line", 0)))
        self._left = after

    def step(self) -> None:
        """Count an optimizer step."""
        num = len(self._lines)
        if not num:
            return  # a second optimizer's step after the same backwards
        if num > 1 and self._adds_up and len(set(self._lines)) == 1:
            self._nums.append(num)
        else:
            self._num_others += 1
            self._nums.clear()
        self._clear()
        if len(self._nums) == NUM_STEPS:
            self.counts = self._nums
        self.is_over = bool(self.counts) or self._num_others == _MAX_OTHERS


NUM_BACKWARDS = 9
"""DDP reports unused parameters for its first 10 backwards, for each of them during the next one."""


class UnusedCount:
    """Follows the first backwards of `model`; call `step` before each optimizer step."""

    def __init__(self, model: DdpModel, notes: Notes) -> None:
        self.is_over = False
        self._model = model
        self._notes = notes
        self._num_bytes = 0

    def step(self) -> None:
        """Add what DDP reports; after the last of the first backwards, note it."""
        num = self._model.reductions.num_forwards
        ddp: Any = self._model.find()
        self.is_over = self.is_over or ddp is None
        if self.is_over or num < 2:
            return
        data = ddp._get_ddp_logging_data()
        if "unused_parameter_size" not in data and num > NUM_BACKWARDS:
            self.is_over = True  # a torch that does not report it
            return
        self._num_bytes = max(self._num_bytes, int(data.get("unused_parameter_size", 0)))
        if num > NUM_BACKWARDS:
            self.is_over = True
            note = UnusedNote(
                group=self._model.group,
                ordinal=self._model.ordinal,
                num_backwards=NUM_BACKWARDS,
                num_bytes=self._num_bytes,
                site=self._model.site,
            )
            self._notes.write("unused", note)
