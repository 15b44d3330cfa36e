# SPDX-License-Identifier: Apache-2.0
"""Give all rows the same random numbers, so that what is computed does not depend on how rows are divided."""

from __future__ import annotations

import functools
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import dataloader as torch_loader

from ddpilot.guard.probes.tensors import num_rows_of

_FACTORIES = ("aten::rand", "aten::randn", "aten::randint")
_LIKE = ("aten::rand_like", "aten::randn_like", "aten::randint_like")
_IN_PLACE = (
    *("aten::normal_", "aten::uniform_", "aten::random_", "aten::exponential_", "aten::cauchy_"),
    *("aten::log_normal_", "aten::geometric_", "aten::bernoulli_"),
)


class DrawAlike(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces the draws of this process from torch's default generators, from the first batch or forward pass on.

    A draw is a row of numbers that depend on its kind and shape only, repeated along the first dimension. Draws with a
    generator of the program's own, and those in DataLoaders, are left as they are.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_active = False
        self.selects_samples = False
        """Numbers of samples are alike, too, that are drawn before the first forward pass."""
        self.num_rows = 0
        """Size of the last batch; permutations of so many elements are not changed."""
        self._pid = os.getpid()  # workers of a DataLoader are forked

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return what `func` returns, or rows that are alike if `func` draws."""
        kwargs = dict(kwargs or {})
        name = func._schema.name
        is_selection = self.selects_samples and name == "aten::randint" and len(args[-1]) == 1
        is_ours = (self.is_active or is_selection) and kwargs.get("generator") is None and os.getpid() == self._pid
        if is_ours and all(issubclass(each, torch.Tensor) and each is torch.Tensor for each in types):
            drawn = self._permute(args, kwargs) if name == "aten::randperm" else _draw(name, func, args, kwargs)
            if drawn is not None:
                return drawn
        return func(*args, **kwargs)

    def _permute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return the identity for the rows of a batch, as mixup permutes them; other permutations select samples."""
        if args[0] != self.num_rows:
            return None
        return torch.arange(args[0], dtype=kwargs.get("dtype") or torch.int64, device=kwargs.get("device") or "cpu")


def _draw(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what `func` draws, with rows that are alike; None if it does not draw."""
    if name in _FACTORIES:
        place = next(number for number, each in enumerate(args) if isinstance(each, list | tuple))
        size = list(args[place])
        on_cpu = {**kwargs, "device": "cpu", "pin_memory": False}
        row = _seeded(name, size[1:], func, *args[:place], _first(size), *args[place + 1 :], **on_cpu)
        return row.expand(size).contiguous().to(kwargs.get("device") or "cpu")
    if name in _LIKE or (name in _IN_PLACE and not isinstance(args[1] if len(args) > 1 else None, torch.Tensor)):
        whole = args[0]
        kept = {key: each for key, each in kwargs.items() if key not in ("device", "pin_memory", "layout")}
        template = torch.empty(_first(whole.shape), dtype=whole.dtype)
        row = _seeded(name, whole.shape[1:], func, template, *args[1:], **kept).expand(whole.shape)
        if name in _IN_PLACE:
            return whole.copy_(row)
        return row.contiguous().to(kwargs.get("device") or whole.device)
    if name in ("aten::bernoulli", "aten::bernoulli_"):  # of a tensor of probabilities
        chances = args[1] if name == "aten::bernoulli_" else args[0]
        out = args[0] if name == "aten::bernoulli_" else torch.empty_like(chances)
        return out.copy_(_seeded(name, out.shape[1:], torch.rand, _first(out.shape)).to(out.device) < chances)
    if name == "aten::normal" and isinstance(args[0], torch.Tensor):
        mean, std = args[0], args[1] if len(args) > 1 else kwargs.get("std", 1.0)
        row = _seeded(name, mean.shape[1:], torch.randn, _first(mean.shape), dtype=mean.dtype)
        return mean + std * row.to(mean.device)
    return None


def _first(size: Sequence[int]) -> list[int]:
    return [min(1, size[0]), *size[1:]] if len(size) else []


def _seeded(name: str, row: Sequence[int], draw: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Call `draw` with a seed that depends on the kind and the shape of a row."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(zlib.crc32(f"{name} {math.prod(row)}".encode()))
    try:
        return draw(*args, **kwargs)
    finally:
        torch.set_rng_state(state)


def draw_alike() -> None:
    """Replace draws in this process until it ends."""
    mode = DrawAlike()
    mode.__enter__()  # type: ignore[no-untyped-call]

    def begin(_: torch.nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not mode.is_active:
            mode.is_active, mode.num_rows = True, num_rows_of(list(args)) or 0

    torch.nn.modules.module.register_module_forward_pre_hook(begin)
    init = torch.optim.Optimizer.__init__

    @functools.wraps(init)
    def with_selection(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        init(optimizer, *args, **kwargs)
        mode.selects_samples = True  # models have been made

    setattr(torch.optim.Optimizer, "__init__", with_selection)  # noqa: B010 - mypy
    for owner, name in ((torch_loader._BaseDataLoaderIter, "__next__"), (torch_loader.DataLoader, "__iter__")):
        setattr(owner, name, _without(mode, getattr(owner, name)))


def _without(mode: DrawAlike, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `original`, a method of a DataLoader, with draws of its own."""

    @functools.wraps(original)
    def inactive(owner: Any) -> Any:
        was_active, mode.is_active = mode.is_active, False
        found = None
        try:
            found = original(owner)
            return found
        finally:
            mode.num_rows = num_rows_of(found) or mode.num_rows
            is_batch = isinstance(owner, torch_loader._BaseDataLoaderIter)
            mode.is_active = was_active or (is_batch and torch.is_grad_enabled())

    return inactive
