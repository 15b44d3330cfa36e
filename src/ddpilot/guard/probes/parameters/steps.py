# SPDX-License-Identifier: Apache-2.0
"""Note every optimizer step and what led to it, and at intervals fingerprints of gradients and parameters."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddpilot.guard.notes import DdpNote, LoadNote, ParametersNote, Site
from ddpilot.guard.probe import Notes, keep_dynamo_out
from ddpilot.guard.probes.caller_source import reads_gradients
from ddpilot.guard.probes.parameters.bypass import BypassCalls
from ddpilot.guard.probes.parameters.ddp_model import DdpModel, UnusedCount
from ddpilot.guard.probes.parameters.parameter_sets import OpenStep, ParameterSets
from ddpilot.guard.probes.process_groups import GroupGenerations, describe_group, find_world, is_alone
from ddpilot.record.accelerator import is_capturing

_MAX_MODELS = 64
_MAX_NAMES = 2000
_MAX_APPLIED = 64
_MAX_MISSING = 20
_NAMED_NUMBERS = re.compile(r"indices which did not receive grad for rank \d+:((?: \d+)+)")


class StepProbe:
    """Observes DDP models, backward passes and optimizers."""

    name = "optimizer steps"

    def __init__(self) -> None:
        self._models: list[DdpModel] = []
        self._num_in_group: dict[str, int] = {}
        self._unused: list[UnusedCount] = []
        self._generations = GroupGenerations()
        self._world: Any = self  # unlike any group, and unlike None
        self._is_alone = True
        self._num_open = 0  # steps that have started and not ended
        self._opened: OpenStep | None = None
        self._is_applying = False
        self._num_applied = 0
        self._sees_cells = False
        self._frozen_at: Site = {}

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        self._notes = notes
        self._parameter_sets = ParameterSets(notes, self._live_models)
        self._note_last = note_last = notes.safely(lambda *_: self._parameter_sets.note_last_steps())
        ddp: Any = DistributedDataParallel
        return [
            register_optimizer_step_pre_hook(notes.safely(self._before_step)).remove,
            register_optimizer_step_post_hook(notes.safely(self._after_step)).remove,
            notes.around(ddp, "__init__", returned=self._wrapped),
            notes.around(ddp, "forward", before=self._before_forward, raised=self._forward_failed),
            notes.around(torch.nn.Module, "requires_grad_", before=self._before_freeze),
            notes.around(ddp, "no_sync", before=self._no_sync_begins),
            notes.around(torch.autograd, "backward", before=self._before_backward, after=self._after_backward),
            notes.around(torch.nn.Module, "load_state_dict", returned=self._loaded),
            notes.around(torch.nn.Module, "apply", before=self._before_apply, after=self._after_apply),
            note_last,
        ]

    def _wrapped(self, _: None, __: None, ddp: Any, *_args: Any, **_kwargs: Any) -> None:
        group = describe_group(ddp.process_group)
        self._follow_group()
        place = self._num_in_group[group] = self._num_in_group.get(group, -1) + 1
        ordinal = f"{self._generations.name}/{place}"
        if len(self._live_models()) >= _MAX_MODELS:
            return
        model = DdpModel(ddp, ordinal=ordinal)
        model.site = self._notes.site()
        self._models.append(model)
        if model.is_alone:
            return
        if ddp.find_unused_parameters and not ddp.static_graph:
            self._unused.append(UnusedCount(model, self._notes))
        described = [
            [name, list(parameter.shape), str(parameter.dtype).removeprefix("torch.")]
            for name, parameter in ddp.module.named_parameters()
            if id(parameter) in model.names
        ]
        note = DdpNote(group=group, ordinal=ordinal, names=described[:_MAX_NAMES], site=model.site)
        self._notes.write("ddp", note)

    def _live_models(self) -> list[DdpModel]:
        freed = [model for model in self._models if model.find() is None]
        if freed:
            self._parameter_sets.drop(freed)
            self._models = [model for model in self._models if model not in freed]
        return self._models

    def _find_models(self, module: Any) -> Iterator[tuple[DdpModel, Any]]:
        """Yield the DDP models that are `module` or contain it, each with its wrapper."""
        for model in self._live_models():
            ddp = model.find()  # keep the wrapper alive from here on: iterating over its modules may free it otherwise
            if ddp is not None and (module is ddp or any(module is part for part in ddp.module.modules())):
                yield model, ddp

    def _follow_group(self) -> None:
        """Start over if the default group has changed. Surviving models are matched with those of other ranks."""
        if self._generations.has_changed():
            self._look_at_cells()
            self._num_in_group.clear()
            self._parameter_sets.clear()
            for model in self._live_models():
                model.ordinal = (
                    f"{self._generations.name}/kept {model.ordinal.rpartition('/')[2].removeprefix('kept ')}"
                )

    def _look_at_cells(self) -> None:
        """In a notebook session, note the newest step at the end of each cell, as it may be the last."""
        shell = getattr(sys.modules.get("IPython"), "get_ipython", _no_shell)()
        if shell is not None and not self._sees_cells:
            self._sees_cells = True
            shell.events.register("post_run_cell", self._note_last)

    # The following functions run in every step with cold caches: each call, line of Python and access to torch costs a
    # microsecond or more, so they are kept short.

    def _before_forward(self, ddp: Any, *_args: Any, **_kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for model in self._models:
            if model.find() is ddp:
                model.reductions.forward(syncs=ddp.require_backward_grad_sync)
                if ddp._join_config.enable:
                    model.why_silent = "join"
                return

    def _before_freeze(self, _: Any, requires_grad: bool = True) -> None:
        if not requires_grad and self._models:
            self._frozen_at = self._notes.site()

    def _forward_failed(self, _: None, ddp: Any, *_args: Any, **_kwargs: Any) -> None:
        """Note parameters that were frozen since `ddp` was made, or else those whose indices DDP's error lists."""
        now = dict(ddp.module.named_parameters())
        known = [name for model in self._models if model.find() is ddp for name in model.names.values()]
        if names := [name for name in known if name in now and not now[name].requires_grad]:
            self._note_missing("frozen", names, self._frozen_at or self._notes.site())
        elif found := _NAMED_NUMBERS.search(str(sys.exc_info()[1])):
            numbers = map(int, found[1].split())
            names = [known[number] for number in numbers if number < len(known)]
            self._note_missing("left_out", names, self._notes.site())

    def _note_missing(self, kind: str, names: list[str], site: Site) -> None:
        if names:
            self._notes.write(kind, ParametersNote(names=names[:_MAX_MISSING], num=len(names), site=site))

    def _before_backward(self, *_args: Any, **_kwargs: Any) -> list[tuple[DdpModel, Any]] | None:
        before = None
        for model in self._models:
            if model.find() is not None:
                before = before or []
                before.append((model, model.gradient_state()))
        return before

    def _after_backward(self, before: list[tuple[DdpModel, Any]] | None, *args: Any, **kwargs: Any) -> None:
        for model, state in before or ():
            if model.has_changed_since(state) and (ddp := model.find()) is not None:
                retains = args[2] if len(args) > 2 else kwargs.get("retain_graph")
                syncs = ddp.require_backward_grad_sync
                model.why_local = why = model.reductions.backward(syncs=syncs, retains=bool(retains))
                if why or not syncs:
                    self._explain(model, ddp, why)
                if model.synced is not None and model.synced.is_nearly_known and self._reads_gradients():
                    # The program reads the gradients of each micro-batch, which therefore have to be reduced.
                    model.synced = None
                if model.synced is not None:
                    is_reduced = syncs and not why and not retains
                    model.synced.backward(self._notes.site(), state, model.gradient_state(), is_reduced=is_reduced)

    def _reads_gradients(self) -> bool:
        frame = self._notes.user_frame()
        return frame is not None and reads_gradients(frame)

    def _no_sync_begins(self, ddp: Any) -> None:
        for model in self._models:
            if model.find() is ddp:
                model.no_sync_site = self._notes.site()

    def _explain(self, model: DdpModel, ddp: Any, why: str) -> None:
        """Find the line of a backward that was not reduced, or that was reduced although it is in `no_sync`."""
        if not why:
            model.without_effect = self._notes.site()
            return
        model.why_site = model.no_sync_site
        if "no_sync" in why:
            return
        if why == "bypass":
            model.bypasses = model.bypasses or BypassCalls(self._notes)
            model.why_site = model.bypasses.find(ddp)
        else:
            model.why_site = self._notes.site()

    def _loaded(self, _: None, __: Any, module: Any, *_args: Any, **_kwargs: Any) -> None:
        for model, _ in self._find_models(module):
            self._note_load(model, "load_state_dict")

    def _note_load(self, model: DdpModel, by: Literal["load_state_dict", "apply"]) -> None:
        note = LoadNote(group=model.group, ordinal=model.ordinal, by=by, site=self._notes.site())
        self._notes.write("load", note)

    def _before_apply(self, module: Any, *_args: Any, **_kwargs: Any) -> list[tuple[DdpModel, Any, list[int]]] | None:
        if self._is_applying or self._num_applied >= _MAX_APPLIED:
            return None  # called for a submodule by an outer `apply`; or in each step, as to clip weights
        self._is_applying = True
        return [(model, ddp, _versions_of(ddp)) for model, ddp in self._find_models(module)]

    def _after_apply(self, before: list[tuple[DdpModel, Any, list[int]]] | None, *_args: Any, **_kwargs: Any) -> None:
        if before is None:
            return
        self._is_applying = False
        for model, ddp, versions in before:
            if _versions_of(ddp) != versions:
                self._num_applied += 1
                self._note_load(model, "apply")

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        # Walking the stack takes a while, and an open step may have ended with an error.
        is_nested = self._num_open > 0 and is_nested_step()
        self._num_open = self._num_open + 1 if is_nested else 1
        world = find_world()
        if world is not self._world:
            self._world, self._is_alone = world, is_alone(world)
        if is_nested:
            return None
        self._opened = None
        if self._is_alone or is_compiling() or is_capturing():
            return None
        if world is not self._generations.group:
            self._follow_group()
        if self._unused:
            self._count_unused()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        has_closure = callable(closure)
        opened = self._parameter_sets.begin_step(optimizer, self._generations.name, has_closure=has_closure)
        if not has_closure:
            self._parameter_sets.end_step(opened)
            return None
        self._opened = opened
        if not any(part.is_due for part in opened.parts):
            return None
        watched = self._look_after(closure, opened)
        return ((args[0], watched, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": watched})

    def _count_unused(self) -> None:
        self._unused = [count for count in self._unused if not count.is_over]
        for count in self._unused:
            count.step()

    def _look_after(self, closure: Callable[..., Any], opened: OpenStep) -> Callable[..., Any]:
        """Wrap `closure` so that gradients are read each time it has returned."""
        look = self._notes.safely(self._parameter_sets.look_at_gradients)

        @functools.wraps(closure, updated=())
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = closure(*args, **kwargs)
            look(opened)
            return result

        keep_dynamo_out(watched)
        return watched

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._num_open:
            self._num_open -= 1
        opened = self._opened
        if opened is not None and opened.optimizer is optimizer:
            self._opened = None
            self._parameter_sets.end_step(opened)


def _no_shell() -> None:
    """Stands in for IPython's `get_ipython` if IPython is not imported."""


def _versions_of(ddp: Any) -> list[int]:
    return [parameter._version for parameter in ddp.module.parameters()]


def is_nested_step() -> bool:
    """True if this step runs inside the step of an optimizer that wraps this one."""
    # All optimizers run their steps through the same torch wrapper, which calls this hook.
    frame: Any = sys._getframe(1)
    step = None
    while frame is not None:
        if frame.f_code is step:
            return True
        if step is None and frame.f_code.co_name == "wrapper":
            step = frame.f_code
        frame = frame.f_back
    return False
