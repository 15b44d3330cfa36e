# SPDX-License-Identifier: Apache-2.0
"""Observe the modules of a rank's first forward passes: layers that depend on the batch, and tensors elsewhere.

Tensors of models, inputs, targets and losses that are not on the rank's device are named.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as functional
from torch.nn.parallel import DistributedDataParallel

from ddpilot.data.nested import get_parts
from ddpilot.diagnose.updates.changes import DROPOUTS
from ddpilot.diagnose.updates.record import Misplaced
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.parameters.parameter_names import find_module_name
from ddpilot.guard.probes.tensors import fingerprint, num_rows_of

_MAX_NAMED = 200
_MAX_DEPTH = 4
_CALL_FRAMES = 6
LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
)
"""Functions of `torch.nn.functional` whose second argument is the target."""
_WITH_WEIGHTS = ("binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "nll_loss")
"""Those whose third argument is `weight`."""


class PlacementObserver:
    """Notes the tensors of the first forward passes and losses. `on_seen` is called after each model and loss."""

    def __init__(self, on_seen: Callable[[], None]) -> None:
        self.device = device_of_rank()
        self.is_on = True
        self.num_seen: Counter[str] = Counter()
        """Number of tensors by kind."""
        self.misplaced: dict[str, Misplaced] = {}
        self._on_seen = on_seen
        self._names: dict[int, str] = {}
        """Names of modules by their ids, with all modules inside them."""
        self._takes_inputs: set[int] = set()
        """Modules inside DDP, which moves its own inputs to the device."""
        self._kept: list[Any] = []
        """Modules whose ids are in `_names`."""

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        """Start observing losses; returns the functions that stop it."""
        self._notes = notes
        return [notes.around(functional, name, before=functools.partial(self._before_loss, name)) for name in LOSSES]

    def before_forward(self, module: torch.nn.Module, args: Any) -> None:
        """Note a module that is called: what it consists of if it is not part of one, and its inputs."""
        is_new = id(module) not in self._names
        if is_new:
            self._add_model(module)
        if id(module) in self._takes_inputs:
            self._takes_inputs.discard(id(module))
            self._add_inputs(module, args, _kwargs_of_call())
        if is_new:
            self._on_seen()

    def _add_model(self, root: torch.nn.Module) -> None:
        name = find_module_name(root, self._notes.user_frame()) or type(root).__name__
        inner = root.module if isinstance(root, DistributedDataParallel) else root
        self._kept.append(root)
        self._names[id(root)] = name
        self._takes_inputs.add(id(inner))
        for path, module in inner.named_modules():
            full = f"{name}.{path}" if path else name
            self._names.setdefault(id(module), full)
            for kind, tensors in (
                ("parameter", module._parameters),
                ("buffer", module._buffers),
                ("attribute", vars(module)),
            ):
                for key, tensor in tensors.items():
                    if isinstance(tensor, torch.Tensor):
                        self._add(kind, f"{kind} `{full}.{key}`", tensor)

    def _add_inputs(self, module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        name = self._names[id(module)]
        for given, value in (*zip(_parameter_names(module, len(args)), args, strict=False), *kwargs.items()):
            for path, tensor in _named_tensors(value, given):
                self._add("input", f"input `{path}` of `{name}`", tensor)

    def _before_loss(self, loss: str, *args: Any, **kwargs: Any) -> None:
        if not self.is_on or not torch.is_grad_enabled():
            return
        target = args[1] if len(args) > 1 else kwargs.get("target")
        weights = {"weight": kwargs.get("weight"), "pos_weight": kwargs.get("pos_weight")}
        if loss in _WITH_WEIGHTS and len(args) > 2:
            weights["weight"] = args[2]
        frame = self._notes.user_frame()
        for kind, path, value in (
            ("target", _name_in(frame, target) or "target", target),
            *(("loss weight", _name_in(frame, value) or key, value) for key, value in weights.items()),
        ):
            for full, tensor in _named_tensors(value, path):
                self._add(kind, f"{kind} `{full}` of {loss}", tensor)
        self._on_seen()

    def _add(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        self.num_seen[kind] += 1
        device = str(tensor.device)
        is_scalar = tensor.dim() == 0 and device == "cpu"  # operations take such numbers on any device
        if device != self.device and not (is_scalar and kind != "parameter") and len(self.misplaced) < _MAX_NAMED:
            found = Misplaced(kind=kind, name=name, device=device, site=self._notes.site())
            self.misplaced.setdefault(name, found)


def _kwargs_of_call() -> Mapping[str, Any]:
    """Return the keyword arguments of the module's call that is running: torch passes them to no global hook."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_CALL_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name in ("inner", "_call_impl") and isinstance(found := frame.f_locals.get("kwargs"), dict):
            return found
        frame = frame.f_back
    return {}


def _parameter_names(module: torch.nn.Module, num: int) -> list[str]:
    try:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, each in inspect.signature(module.forward).parameters.items() if each.kind in kinds]
    except (TypeError, ValueError):
        names = []
    return names[:num] + [str(number) for number in range(len(names), num)]


def _named_tensors(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in `value` with names such as ``batch['x']`` and ``x[1]``."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth < _MAX_DEPTH and (parts := get_parts(value)) is not None:
        keys = list(value) if isinstance(value, Mapping) else range(len(parts))
        for key, part in zip(keys, parts, strict=True):
            yield from _named_tensors(part, f"{name}[{key!r}]", depth + 1)


def _name_in(frame: FrameType | None, value: object) -> str:
    """Return the variable of `frame` that holds `value`, or a container with it; "" if there is none."""
    if frame is None or value is None:
        return ""
    for name, held in list(frame.f_locals.items()):
        if held is value:
            return name
    for name, held in list(frame.f_locals.items()):
        if type(held) in (dict, list, tuple):
            keys = held.items() if type(held) is dict else enumerate(held)
            for key, part in keys:
                if part is value:
                    return f"{name}[{key!r}]"
    return ""


@functools.cache
def device_of_rank() -> str:
    """Return the device that belongs to this rank, in torch's notation."""
    if not torch.accelerator.is_available():
        return "cpu"
    kind = torch.accelerator.current_accelerator()
    return f"{kind}:{int(os.environ.get('LOCAL_RANK', '0')) % max(1, torch.accelerator.device_count())}"


class ModuleObserver:
    """The part of the probe that sees modules. `on_seen` is called after each model and loss of the first update."""

    def __init__(self, on_seen: Callable[[], None]) -> None:
        self._is_first = True
        self.expects_inputs = True
        """The next module that is called is the outermost one of a forward pass."""
        self.inputs: list[int] = []
        self.num_rows = 0
        self.num_dropped_out = 0
        self.batch_norms: list[str] = []
        self.has_evaluated = False
        """A module was called without gradients."""
        self.placements = PlacementObserver(on_seen)

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        """Start observing; returns the functions that stop it."""
        handle = torch.nn.modules.module.register_module_forward_pre_hook(notes.safely(self._before_forward))
        dropouts = [notes.around(functional, name, before=self._drop) for name in DROPOUTS]
        attention = notes.around(functional, "scaled_dot_product_attention", before=self._attend)
        norm = notes.around(functional, "batch_norm", before=self._normalize)
        return [handle.remove, *dropouts, attention, norm, *self.placements.install(notes)]

    def end_first_update(self) -> None:
        """Stop observing what the first update shows."""
        self._is_first = self.placements.is_on = False

    def _drop(self, _: Any, p: float = 0.5, training: bool = True, *_args: Any, **_kwargs: Any) -> None:
        self.num_dropped_out += bool(training and p > 0)

    def _attend(self, *args: Any, **kwargs: Any) -> None:
        self.num_dropped_out += bool((args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0)

    def _normalize(self, *args: Any, **kwargs: Any) -> None:
        is_training = args[5] if len(args) > 5 else kwargs.get("training", False)
        if is_training and torch.is_grad_enabled() and not self.batch_norms:
            self.batch_norms.append("BatchNorm")

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if self.expects_inputs and torch.is_grad_enabled():
            self.expects_inputs = False
            seen = fingerprint(list(args))
            self.inputs.append(seen.checksum if seen else 0)
            self.num_rows += num_rows_of(list(args)) or 0
        self.has_evaluated = self.has_evaluated or not torch.is_grad_enabled()
        if not self._is_first:
            return
        if isinstance(module, torch.nn.RNNBase) and module.dropout > 0 and module.training:
            self.num_dropped_out += 1
        self.placements.before_forward(module, args)
