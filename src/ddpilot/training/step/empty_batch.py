# SPDX-License-Identifier: Apache-2.0
"""Lets a rank with an empty batch join the forward pass: a model that fails on zero rows runs on dummy rows.

The outputs of the dummy rows are sliced off.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ddpilot.data.nested import iterate_tensors, map_tensors, without_rows
from ddpilot.group.device import broadcast_tensors, fork_rng, wire_device
from ddpilot.group.protocol import GroupLike
from ddpilot.training.models.sharding import is_sharded

_NUM_ROWS = 2
"""BatchNorm rejects a single row."""
_FILLS_ON_CPU = (1, 0)
"""Values of dummy rows: 1 is a valid length, mask and class for most models; 0 is tried if the model fails on 1."""
_FILLS_ELSEWHERE = (0, 1)
"""An accelerator reports an index out of range asynchronously and is unusable afterwards. 0 is always in range, and a
length of 0 is rejected on the host."""


class EmptyBatchForward:
    """Prepared models whose `forward` accepts zero rows while this rank has no samples."""

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, Any, Any]] = []

    def begin(self, models: Sequence[nn.Module]) -> None:
        """Until `end`, let `forward` of `models` (not DDP models) run on dummy rows if it raises for zero rows.

        The result has zero rows. Buffers and random states are unchanged; numbers and tensors in other attributes of
        modules, such as a step counter, are as after one forward pass.
        """
        for model in models:
            # Statistics over all ranks and gathering parameters are collectives: those of a second forward pass would
            # be paired with different ones.
            shares = is_sharded(model) or any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules())
            if not shares and not isinstance(model, torch.jit.ScriptModule):
                # Not by setattr, which a compiled module forwards. Some libraries replace `forward` as well.
                self._replaced.append((model, model.__dict__.get("forward"), model._compiled_call_impl))
                model.__dict__["_compiled_call_impl"] = None  # it would be compiled for zero rows, and for this forward
                model.__dict__["forward"] = _uncompiled(functools.partial(_forward, model, model.forward))

    def end(self) -> None:
        """Restore `forward` of the models."""
        while self._replaced:
            model, own, compiled = self._replaced.pop()
            model.__dict__["_compiled_call_impl"] = compiled
            del model.__dict__["forward"]
            if own is not None:
                model.__dict__["forward"] = own


def share_buffers(models: Iterable[nn.Module], group: GroupLike, *, had_samples: bool, had_each: bool = True) -> None:
    """Broadcast the buffers of the first rank that `had_samples`, after a batch where some rank had none. Collective.

    Values that a forward pass without rows writes to a buffer (a step counter, a power iteration) are missing or wrong.
    `had_each`: this rank had samples of each of several loaders; such ranks come first.
    """
    buffers = [buffer for model in models if model.training for buffer in model.buffers()]
    if buffers and group.world_size > 1:
        missed = 0 if had_samples and had_each else 1 if had_samples else 2
        first = torch.tensor(missed * group.world_size + group.rank, device=wire_device(group))
        broadcast_tensors(buffers, group, int(group.all_reduce(first, "min").item()) % group.world_size)


def _uncompiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    # Importing the compiler takes seconds; if it was not imported, nothing is compiled.
    return torch.compiler.disable(forward) if "torch._dynamo" in sys.modules else forward  # type: ignore[no-untyped-call]


def _forward(model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if all(tensor.numel() for tensor in iterate_tensors((args, kwargs))):
        return forward(*args, **kwargs)
    with _copied_buffers(model), fork_rng({one.device for one in model.parameters()}):
        attributes = _Attributes(model)
        try:
            return forward(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            for fill in fills(model):
                try:
                    return _run_on_rows(forward, args, kwargs, fill, attributes)
                except (RuntimeError, ValueError, IndexError, TypeError):
                    continue
            raise error


def fills(model: nn.Module) -> tuple[int, ...]:
    """Return the values to try for dummy rows of `model`, in order."""
    is_on_cpu = all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))
    return _FILLS_ON_CPU if is_on_cpu else _FILLS_ELSEWHERE


def _run_on_rows(forward: Callable[..., Any], args: Any, kwargs: Any, fill: int, attributes: _Attributes) -> Any:
    """Return the result for dummy rows with these rows removed, and with the graph of a forward pass with rows."""

    def run(num: int) -> Any:
        attributes.restore()
        more, named = map_tensors((args, kwargs), lambda tensor: _with_rows(tensor, num, fill))
        return forward(*more, **named)

    with torch.no_grad():  # outputs that grow with one more row have rows
        longer = run(_NUM_ROWS + 1)
    return without_rows(run(_NUM_ROWS), longer)


def _with_rows(tensor: torch.Tensor, num: int, fill: int) -> torch.Tensor:
    if tensor.numel():
        return tensor
    made = torch.full([size or num for size in tensor.shape], fill, dtype=tensor.dtype, device=tensor.device)
    # The tensors that it was computed from get a gradient, too.
    return made + tensor.sum().to(made.dtype) if tensor.requires_grad else made


class _Attributes:
    """The numbers and tensors in plain attributes of a model's modules, for repeated forward passes."""

    def __init__(self, model: nn.Module) -> None:
        plain = [(vars(layer), name, value) for layer in model.modules() for name, value in vars(layer).items()]
        self._numbers = [one for one in plain if isinstance(one[2], bool | int | float | complex)]
        tensors = [one for one in plain if isinstance(one[2], torch.Tensor) and not one[2].is_inference()]
        self._tensors = [(*one, one[2]._version, one[2].detach().clone()) for one in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Give each attribute the object and the value that it had."""
        for attributes, name, number in self._numbers:
            attributes[name] = number
        for attributes, name, tensor, version, copy in self._tensors:
            attributes[name] = tensor
            if tensor._version != version:
                tensor.copy_(copy)


@contextmanager
def _copied_buffers(model: nn.Module) -> Iterator[None]:
    """Replace the buffers by copies within the block, so that writes to them are discarded."""
    places = [(layer, dict(layer._buffers)) for layer in model.modules() if layer._buffers]
    try:
        for layer, buffers in places:
            layer._buffers.update({name: None if one is None else one.clone() for name, one in buffers.items()})
        yield
    finally:
        for layer, buffers in places:
            layer._buffers.update(buffers)
