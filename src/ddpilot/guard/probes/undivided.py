# SPDX-License-Identifier: Apache-2.0
"""Detect accumulated gradients of mean losses that are not divided by the number of micro-batches.

Observation starts with the first `no_sync`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.data.prints import tensors_in
from ddpilot.guard.probes.fingerprint import is_plain
from ddpilot.guard.probes.mean_loss import find_unscaled, is_mean
from ddpilot.guard.probes.source import divides_learning_rate, is_accumulating
from ddpilot.record.capturing import is_capturing

FIRST_GROUPS = 2
"""Number of steps that are observed completely before the first note."""

NUM_GROUPS = 16
"""Number of steps after which the note is final; until then, contrary evidence revokes it."""

_NUM_VALUES = 64
# Other optimizers take the same step whatever the gradient is multiplied by.
_OPTIMIZERS = (torch.optim.SGD, torch.optim.ASGD)
_ROUNDING = 1e-3


@dataclass(frozen=True)
class _Backward:
    """One backward pass. `state` and `values` describe the model's gradients before it."""

    line: tuple[str, int]
    is_mean: bool
    is_local: bool
    is_mixed: bool
    """True if `no_sync` was around only the forward or only the backward."""
    scale: Tensor | None
    """What the loss was multiplied by, for example by a `GradScaler`."""
    state: list[Any]
    values: list[Tensor] | None
    loss: str
    site: dict[str, Any]


@dataclass
class _Group:
    """The forwards and backwards before one step."""

    backwards: list[_Backward] = field(default_factory=list)
    inputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    num_forwards: int = 0
    is_refuted: bool = False
    """True if gradients changed between two backwards, or if one batch went through the model twice."""

    def is_accumulation(self) -> bool:
        """True if mean losses of one line were accumulated, all but the last in `no_sync`, without anything else."""
        lines = {each.line for each in self.backwards}
        are_local = [each.is_local for each in self.backwards]
        return (
            not self.is_refuted
            and self.num_forwards == len(self.backwards) > 1
            and len(lines) == 1
            and are_local == [True] * (len(are_local) - 1) + [False]
            and all(each.is_mean and not each.is_mixed for each in self.backwards)
            and len({each.scale is None for each in self.backwards}) == 1
        )

    def find_scale(self) -> float | None:
        """The factor that all losses were multiplied by; None if factors differ."""
        # Waits for a GPU; called only for the first groups.
        scales = {1.0 if each.scale is None else float(each.scale) for each in self.backwards}
        return scales.pop() if len(scales) == 1 else None


class UndividedProbe:
    """Observes the first steps of a model that uses `no_sync`; other hooks are installed only during that time."""

    name = "accumulated losses"

    def __init__(self) -> None:
        self._looking: list[Callable[[], None]] = []
        self._ddp: weakref.ref[Any] | None = None
        self._samples: list[Any] = []
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._begin_anew()
        self._is_over = True

    def _begin_anew(self) -> None:
        self._is_over = False
        self._group = _Group()
        self._num_groups = 0
        self._after: list[Tensor] | None = None
        self._is_told_by_source = False
        self._noted: dict[str, Any] = {}

    def install(self, notes: Notes) -> Callable[[], None]:
        """Install the probe, see `Probe.install`."""
        self._notes = notes
        undo = notes.around(DistributedDataParallel, "no_sync", before=self._no_sync_begins)

        def uninstall() -> None:
            self._take_out()
            undo()

        return uninstall

    def _no_sync_begins(self, ddp: Any) -> None:
        looked_at = self._ddp() if self._ddp is not None and not self._is_over else None
        if looked_at is not None and looked_at is not ddp:
            self._refute()  # two models, possibly with losses of one going through the other
        elif looked_at is None and ddp not in self._seen:
            self._begin(ddp)
        self._seen.add(ddp)

    def _begin(self, ddp: Any) -> None:
        self._take_out()
        trainable = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        if dist.get_world_size(ddp.process_group) < 2 or not trainable:
            return
        self._begin_anew()
        self._ddp = weakref.ref(ddp)
        self._samples = [weakref.ref(trainable[place]) for place in {0, len(trainable) // 2, len(trainable) - 1}]
        around, before_step = self._notes.around, self._notes.safely(self._before_step)
        self._looking = [
            around(DistributedDataParallel, "forward", before=self._before_forward),
            around(torch.autograd, "backward", before=self._before_backward, after=self._after_backward),
            around(GradScaler, "update", before=self._before_update),
            register_optimizer_step_pre_hook(before_step).remove,
        ]

    def _take_out(self) -> None:
        # Not called in an optimizer hook, while torch iterates over the hooks.
        self._is_over = True
        while self._looking:
            self._looking.pop()()

    def _refute(self) -> None:
        self._is_over = True
        if self._noted:
            self._notes.write("undivided", **self._noted | {"groups": 0})

    def _before_forward(self, ddp: Any, *inputs: Any, **kwargs: Any) -> None:
        if self._is_over:
            self._take_out()
        if self._is_over or self._ddp is None or ddp is not self._ddp() or not torch.is_grad_enabled():
            return
        group = self._group
        group.num_forwards += 1
        given = [tensor for _, tensor in tensors_in((inputs, kwargs))]
        known = [reference() for reference in group.inputs]
        group.is_refuted |= any(tensor is other for tensor in given for other in known)
        group.inputs += [weakref.ref(tensor) for tensor in given]

    def _before_backward(
        self, tensors: Any, grad_tensors: Any = None, *more: Any, inputs: Any = None, **_: Any
    ) -> _Backward | None:
        ddp = self._ddp() if self._ddp is not None and not self._is_over else None
        frame = self._notes.user_frame() if ddp is not None and not is_capturing() else None
        if ddp is None or frame is None:
            return None
        is_local = not ddp.require_backward_grad_sync
        if not is_local and self._num_groups == FIRST_GROUPS - 1:
            self._is_told_by_source = is_accumulating(frame) and not divides_learning_rate(frame)
        given = [tensors] if isinstance(tensors, Tensor) else [each for _, each in tensors_in(tensors)]
        is_plain = len(given) == 1 and grad_tensors is None and inputs is None and not more[2:]
        loss, scale = find_unscaled(given[0].grad_fn) if given else (None, None)
        state, values = self._look()
        return _Backward(
            line=(frame.f_code.co_filename, frame.f_lineno),
            is_mean=is_plain and _is_number(given[0]) and is_mean(loss),
            is_local=is_local,
            is_mixed=is_local is bool(ddp.require_forward_param_sync),
            state=state,
            values=values,
            scale=scale,
            loss=loss.name() if loss is not None else "",
            site=self._notes.site(frame),
        )

    def _after_backward(self, backward: _Backward | None, returned: bool, *_: Any, **__: Any) -> None:
        if backward is None or self._is_over:
            return
        state, values = self._look()
        if state == backward.state:
            return  # of a different model
        group = self._group
        if group.backwards:
            group.is_refuted |= not _are_same(self._after, backward.values)
        group.is_refuted |= not returned
        group.backwards.append(backward)
        self._after = values

    def _before_update(self, *_: Any, **__: Any) -> None:
        """Handle a scaler's update: a group without a step was skipped because of non-finite gradients."""
        if self._is_over or not self._group.backwards:
            return
        if self._group.is_accumulation():
            self._group = _Group()
        else:
            self._refute()

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_over or not self._has_model(optimizer) or not self._group.backwards:
            return
        group, self._group = self._group, _Group()
        if len(group.backwards) == 1 and not group.backwards[0].is_local:
            return  # a step without accumulation
        is_bare = type(optimizer) in _OPTIMIZERS and not optimizer._optimizer_step_pre_hooks
        if not (is_bare and group.is_accumulation() and self._is_unchanged(group)):
            self._refute()
            return
        self._num_groups += 1
        if self._num_groups == FIRST_GROUPS and not (self._is_told_by_source and self._has_no_hooks()):
            self._is_over = True
        elif self._num_groups in (FIRST_GROUPS, NUM_GROUPS):
            last = group.backwards[-1]
            facts = {"num": len(group.backwards), "loss": last.loss, "is_scaled": last.scale is not None}
            self._noted = facts | {"site": last.site}
            self._notes.write("undivided", **self._noted, groups=self._num_groups, step=self._notes.site())
            self._is_over = self._num_groups == NUM_GROUPS

    def _is_unchanged(self, group: _Group) -> bool:
        """True if the step's gradients are those after the last backward, divided by the factor of the losses."""
        values = self._look()[1]
        if values is None or self._after is None:
            return True
        scale = group.find_scale()
        is_finite = all(bool(each.isfinite().all()) for each in values)
        return scale is not None and is_finite and _are_same(self._after, values, scale)

    def _has_model(self, optimizer: Optimizer) -> bool:
        parameter = self._samples[0]()
        return any(each is parameter for group in optimizer.param_groups for each in group["params"])

    def _has_no_hooks(self) -> bool:
        """True if no hook can change gradients during the backward."""
        ddp = self._ddp() if self._ddp is not None else None
        return ddp is not None and not (
            getattr(ddp, "_comm_hooks", ())
            or ddp._join_config.enable
            or any(each._backward_hooks or each._post_accumulate_grad_hooks for each in ddp.module.parameters())
        )

    def _look(self) -> tuple[list[Any], list[Tensor] | None]:
        """Return a state that a backward changes, and some gradient values, or None after the first steps."""
        given = [parameter.grad for reference in self._samples if (parameter := reference()) is not None]
        found = [gradient for gradient in given if gradient is not None and is_plain(gradient)]
        state = [(gradient.data_ptr(), gradient._version) for gradient in found]
        if self._num_groups >= FIRST_GROUPS:
            return state, None
        return state, [gradient.detach().reshape(-1)[:_NUM_VALUES].clone() for gradient in found]


def _are_same(one: list[Tensor] | None, other: list[Tensor] | None, scale: float = 1.0) -> bool:
    """True if the observed gradients differ only by the factor `scale`.

    Compares values: changes through `p.grad.data` leave no trace in the version, and clipping changes the version also
    if it changes no value.
    """
    if one is None or other is None:
        return True
    if len(one) != len(other):
        return False
    rtol = _ROUNDING if scale != 1.0 else 0.0
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a / scale, b, rtol=rtol, atol=0.0, equal_nan=True) for a, b in pairs)


def _is_number(loss: Tensor) -> bool:
    return loss.numel() == 1 and not getattr(loss, "_backward_hooks", None)
