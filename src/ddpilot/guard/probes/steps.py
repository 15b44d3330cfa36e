# SPDX-License-Identifier: Apache-2.0
"""Notes every optimizer step: what led to it, and from time to time fingerprints of gradients and parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddpilot.guard.probe import Notes, keep_dynamo_out
from ddpilot.guard.probes.bypass_line import find_bypass_line
from ddpilot.guard.probes.ddp_model import DdpModel
from ddpilot.guard.probes.groups import Eras, describe_group, has_several_ranks
from ddpilot.guard.probes.units import UnitBook
from ddpilot.guard.probes.unused import UnusedCount

_MAX_MODELS = 64
_MAX_NAMES = 2000


class StepProbe:
    """Looks at DDP models, at backward passes and at optimizers."""

    name = "optimizer steps"

    def __init__(self) -> None:
        self._models: list[DdpModel] = []
        self._num_models = 0
        self._num_in_group: dict[str, int] = {}
        self._unused: list[UnusedCount] = []
        self._eras = Eras()
        self._num_open = 0  # steps that have begun and not ended

    def install(self, notes: Notes) -> Callable[[], None]:
        """As `Probe.install`."""
        self._notes = notes
        self._units = UnitBook(notes, self._live_models)
        pre_hook = notes.safely(self._before_step)
        keep_dynamo_out(pre_hook)
        ddp: Any = DistributedDataParallel
        undo = [
            register_optimizer_step_pre_hook(pre_hook).remove,
            register_optimizer_step_post_hook(notes.safely(self._after_step)).remove,
            notes.around(ddp, "__init__", after=self._wrapped),
            notes.around(ddp, "forward", before=self._before_forward),
            notes.around(ddp, "no_sync", before=self._no_sync_begins),
            notes.around(torch.autograd, "backward", before=self._before_backward, after=self._after_backward),
            notes.around(torch.nn.Module, "load_state_dict", after=self._loaded),
        ]

        def uninstall() -> None:
            for function in reversed(undo):
                function()

        return uninstall

    def _wrapped(self, _: None, returned: bool, __: object, ddp: Any, *_args: Any, **_kwargs: Any) -> None:
        if not returned:
            return
        group = describe_group(ddp.process_group)
        self._follow_group()
        place = self._num_in_group[group] = self._num_in_group.get(group, -1) + 1
        ordinal = f"{self._eras.name}/{place}"
        self._num_models += 1
        if len(self._live_models()) >= _MAX_MODELS:
            return
        model = DdpModel(ddp, number=self._num_models, ordinal=ordinal)
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
        self._notes.write(
            "ddp",
            group=group,
            ordinal=ordinal,
            names=described[:_MAX_NAMES],
            find_unused=bool(ddp.find_unused_parameters),
            static=bool(ddp.static_graph),
            site=model.site,
        )

    def _live_models(self) -> list[DdpModel]:
        if any(model.ddp is None for model in self._models):
            self._models = [model for model in self._models if model.ddp is not None]
        return self._models

    def _follow_group(self) -> None:
        """Begin anew where the ranks are in another group: models that were kept are what other ranks have kept."""
        if self._eras.has_changed():
            self._num_in_group.clear()
            self._units.clear()
            for model in self._live_models():
                model.ordinal = f"{self._eras.name}/kept {model.ordinal.rpartition('/')[2].removeprefix('kept ')}"

    def _model_of(self, ddp: Any) -> DdpModel | None:
        return next((model for model in self._models if model.ddp is ddp), None)

    def _before_forward(self, ddp: Any, *_args: Any, **_kwargs: Any) -> None:
        if torch.is_grad_enabled() and (model := self._model_of(ddp)) is not None:
            model.reductions.forward(syncs=ddp.require_backward_grad_sync)
            if ddp._join_config.enable:
                model.why_silent = "join"

    def _no_sync_begins(self, ddp: Any) -> None:
        if (model := self._model_of(ddp)) is not None:
            model.no_sync_site = self._notes.site()

    def _before_backward(self, *_args: Any, **_kwargs: Any) -> list[tuple[DdpModel, list[Any]]]:
        return [(model, model.gradient_state()) for model in self._live_models()]

    def _after_backward(
        self, before: list[tuple[DdpModel, list[Any]]] | None, _returned: bool, _: object, *args: Any, **kwargs: Any
    ) -> None:
        for model, state in before or ():
            if model.has_changed_since(state) and (ddp := model.ddp) is not None:
                retains = bool(kwargs.get("retain_graph", args[2] if len(args) > 2 else None))
                self._follow(model, syncs=ddp.require_backward_grad_sync, retains=retains)

    def _follow(self, model: DdpModel, *, syncs: bool, retains: bool) -> None:
        model.why_local = why = model.reductions.backward(syncs=syncs, retains=retains)
        if not why:
            if not syncs:
                model.without_effect = self._notes.site()
            return
        model.why_site = model.no_sync_site
        if "no_sync" in why:
            return
        frame = self._notes.user_frame()
        model.why_site = self._notes.site(frame)
        if why == "bypass" and frame is not None:
            inside = {id(module) for module in model.ddp.module.modules()}
            line = find_bypass_line(frame, inside)
            if line is not None:
                model.why_site = self._notes.site(frame, line)

    def _loaded(self, _: None, returned: bool, __: object, module: Any, *_args: Any, **_kwargs: Any) -> None:
        if returned:
            for model in self._live_models():
                if module is model.ddp or any(module is part for part in model.ddp.module.modules()):
                    site = self._notes.site()
                    self._notes.write("load", group=model.group, ordinal=model.ordinal, site=site)

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # To look through the stack takes a while, and one that is open may have ended by an error.
        is_nested = self._num_open > 0 and _is_nested()
        self._num_open = self._num_open + 1 if is_nested else 1
        if is_nested or torch.compiler.is_compiling() or _is_capturing() or not has_several_ranks():
            return
        self._follow_group()
        self._units.step(optimizer, self._eras.name)
        self._unused = [count for count in self._unused if not count.is_over]
        for count in self._unused:
            count.step()

    def _after_step(self, *_: Any) -> None:
        self._num_open = max(0, self._num_open - 1)


def _is_nested() -> bool:
    """Whether this step is part of another optimizer's, which wraps this one."""
    # All optimizers run their steps through the same wrapper of torch's, which calls this hook.
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "wrapper":
        frame = frame.f_back
    return frame is not None and any(outer.f_code is frame.f_code for outer in _outer(frame))


def _outer(frame: Any) -> Iterator[Any]:
    while (frame := frame.f_back) is not None:
        yield frame


def _is_capturing() -> bool:
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())
