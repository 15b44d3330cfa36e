# SPDX-License-Identifier: Apache-2.0
"""Counts the parameters of a model, and freezes and unfreezes them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from ddpilot.errors import LoopError
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.models.sharding import is_sharded

_NUM_NEAR = 4


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameter and buffer sizes of a model; tied parameters count once. `str()` gives a one-line summary."""

    total: int
    """Number of elements in all parameters."""
    trainable: int
    """Number of elements in parameters with `requires_grad`."""
    parameter_bytes: int
    """Memory of the parameters. Training with AdamW takes four times as much, with gradients and two moments."""
    buffer_bytes: int
    """Memory of the buffers, such as BatchNorm's statistics."""

    @property
    def frozen(self) -> int:
        """Number of elements in parameters without `requires_grad`."""
        return self.total - self.trainable

    def __str__(self) -> str:
        frozen = f", {self.frozen:,} frozen" if self.frozen else ""
        size = (self.parameter_bytes + self.buffer_bytes) / 1e6
        return f"{self.total:,} parameters ({self.trainable:,} trained{frozen}), {size:,.1f} MB"


def count_parameters(model: nn.Module) -> ParameterCount:
    """Count the parameters and buffers of `model`, plain or prepared. Not collective.

    Raises LoopError for a lazy layer that has not been initialised by a batch yet.
    """
    lazy = [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        fix = "Run one batch through the model first."
        raise LoopError("counting parameters", found=f"{', '.join(lazy[:_NUM_NEAR])} have no shape yet", fix=fix)
    parameters = list(model.parameters())
    return ParameterCount(
        total=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
    )


def freeze(model: nn.Module, *patterns: str) -> list[str]:
    """Freeze the parameters that match one of `patterns` and return their names. Not collective: call it on every rank.

    A pattern is the name of a parameter or of a layer ("encoder": everything inside), with shell wildcards
    ("blocks.[0-3]", "*.bias"). Without patterns, every parameter is frozen. Gradients of frozen parameters are set to
    None, so an optimizer that holds such parameters does not change them, not even by weight decay. A frozen BatchNorm
    still updates its statistics in `train()`.

    Call it before `prepare`, so that DDP leaves the frozen parameters out. Later, call `freeze(ddpilot.unwrap(model),
    ...)` and then `model = loop.prepare(ddpilot.unwrap(model))`.

    Raises LoopError, without any change, for a DDP model, and for a pattern without matches; the message has similar
    names.
    """
    return _set(model, patterns, trained=False)


def unfreeze(model: nn.Module, *patterns: str) -> list[str]:
    """Unfreeze the parameters that match one of `patterns` and return their names. Not collective. See `freeze`."""
    return _set(model, patterns, trained=True)


def _set(model: nn.Module, patterns: tuple[str, ...], *, trained: bool) -> list[str]:
    did = "unfreezing parameters" if trained else "freezing parameters"
    if isinstance(model, DistributedDataParallel):
        raise LoopError(
            did,
            found="the model is in DDP, which has determined already which gradients it waits for",
            fix=f"Do it before prepare(); or {'un' * trained}freeze(ddpilot.unwrap(model), ...) and then "
            "model = loop.prepare(ddpilot.unwrap(model)). With a Trainer: between two fits.",
        )
    if is_sharded(model):
        fix = "Do it before prepare()."
        raise LoopError(did, found="the parameters of the model are sharded over ranks", fix=fix)
    named = dict(unwrap(model).named_parameters(remove_duplicate=False))
    chosen = list(named) if not patterns else list(_match(named, patterns, did))
    for name in chosen:
        named[name].requires_grad_(trained)
        if not trained:
            named[name].grad = None
    return chosen


def _match(named: dict[str, nn.Parameter], patterns: tuple[str, ...], did: str) -> Iterator[str]:
    hits: dict[str, None] = {}
    for pattern in patterns:
        found = [name for name in named if any(fnmatchcase(part, pattern) for part in (name, *_layers(name)))]
        if not found:
            raise _nothing_matches(pattern, named, did)
        hits |= dict.fromkeys(found)
    return (name for name in named if name in hits)


def _layers(name: str) -> Iterator[str]:
    """Yield the layers that contain a parameter: "a.b", "a" for "a.b.weight"."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _nothing_matches(pattern: str, named: dict[str, nn.Parameter], did: str) -> LoopError:
    names = dict.fromkeys(part for name in named for part in (*reversed([*_layers(name)]), name))
    near = difflib.get_close_matches(pattern, names, n=_NUM_NEAR, cutoff=0.4) or list(names)[:_NUM_NEAR]
    return LoopError(
        did,
        found=f"no parameter or layer is called {pattern!r}",
        fix=f"Similar names are {', '.join(map(repr, near))}; wildcards as in 'blocks.*' are possible.",
    )
