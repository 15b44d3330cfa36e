# SPDX-License-Identifier: Apache-2.0
"""Runs a model that cannot run zero rows on made-up ones, where a rank has no sample, and gives out none of them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ddpilot.data.batches import without_rows
from ddpilot.training.accelerator import fork_rng
from ddpilot.training.structure import map_tensors

_NUM_ROWS = 2
"""BatchNorm refuses a single one."""
_FILLS_ON_CPU = (1, 0)
"""What made-up rows hold: 1 is a length, a mask and a class that models accept; where they do not, 0."""
_FILLS_ELSEWHERE = (0, 1)
"""An accelerator reports an index beyond a table later, and can do nothing more then. 0 is never beyond one, and is
refused (as a length) on the host."""


class StandIns:
    """Prepared models whose `forward` knows what to do with zero rows, while this rank has no sample."""

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, Any]] = []

    def begin(self, models: Sequence[nn.Module]) -> None:
        """Until `end`: a forward of one of `models`, as they are outside of DDP, that raises for zero rows runs on
        made-up rows, and gives out its result without them. Buffers stay as they are, random state too.
        """
        for model in models:
            # Statistics of all ranks are collectives: those of a second forward would meet others.
            shares = any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules())
            if not shares and not isinstance(model, torch.jit.ScriptModule):
                # Not by setattr: a compiled module hands that on. Some libraries replace `forward` as well.
                self._replaced.append((model, model.__dict__.get("forward")))
                model.__dict__["forward"] = _uncompiled(functools.partial(_forward, model, model.forward))

    def end(self) -> None:
        """The models are as they were."""
        while self._replaced:
            model, own = self._replaced.pop()
            del model.__dict__["forward"]
            if own is not None:
                model.__dict__["forward"] = own


def _uncompiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    # To import the compiler takes seconds; where nothing has, nothing is compiled.
    return torch.compiler.disable(forward) if "torch._dynamo" in sys.modules else forward  # type: ignore[no-untyped-call]


def _forward(model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _has_no_rows((args, kwargs)):
        return forward(*args, **kwargs)
    with _borrowed_buffers(model), _kept_random_state(model):
        try:
            return forward(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            for fill in fills(model):
                try:
                    return _run_on_rows(forward, args, kwargs, fill)
                except (RuntimeError, ValueError, IndexError, TypeError):
                    continue
            raise error


def fills(model: nn.Module) -> tuple[int, ...]:
    """The values to try for made-up rows of `model`, in this order."""
    is_on_cpu = all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))
    return _FILLS_ON_CPU if is_on_cpu else _FILLS_ELSEWHERE


def _run_on_rows(forward: Callable[..., Any], args: Any, kwargs: Any, fill: int) -> Any:
    """The result for made-up rows, without them, its graph that of a forward with rows."""

    def run(num: int) -> Any:
        more, named = map_tensors((args, kwargs), lambda tensor: _with_rows(tensor, num, fill))
        return forward(*more, **named)

    with torch.no_grad():  # what is longer with one row more holds rows
        longer = run(_NUM_ROWS + 1)
    return without_rows(run(_NUM_ROWS), longer)


def _with_rows(tensor: torch.Tensor, num: int, fill: int) -> torch.Tensor:
    if tensor.numel():
        return tensor
    made = torch.full([size or num for size in tensor.shape], fill, dtype=tensor.dtype, device=tensor.device)
    # What it was computed from gets its gradient, too.
    return made + tensor.sum().to(made.dtype) if tensor.requires_grad else made


def _has_no_rows(data: Any) -> bool:
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(data, note)
    return any(tensor.numel() == 0 for tensor in tensors)


@contextmanager
def _borrowed_buffers(model: nn.Module) -> Iterator[None]:
    """Copies take the place of the buffers for a while: what is written to them is lost."""
    places = [(layer, dict(layer._buffers)) for layer in model.modules() if layer._buffers]
    try:
        for layer, buffers in places:
            layer._buffers.update({name: None if one is None else one.clone() for name, one in buffers.items()})
        yield
    finally:
        for layer, buffers in places:
            layer._buffers.update(buffers)


@contextmanager
def _kept_random_state(model: nn.Module) -> Iterator[None]:
    with fork_rng({one.device for one in model.parameters()}):
        yield
