# SPDX-License-Identifier: Apache-2.0
"""Change in this process what a run is to be compared without: dropout, batch statistics, batch sizes, precision.

Nothing is undone: the process ends with the run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler
from torch.utils.data import dataloader as torch_loader

from ddpilot.data.nested import get_parts, replace_parts
from ddpilot.diagnose.updates.draws import draw_alike
from ddpilot.diagnose.updates.record import RecordSpec
from ddpilot.guard.probes.tensors import num_rows_of

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
"""Functions of `torch.nn.functional` that take `p` and `training` as their second and third argument."""


def apply_changes(spec: RecordSpec) -> None:
    """Make all changes that `spec` asks for."""
    if not spec.has_dropout:
        _remove_dropout()
    if not spec.has_batch_statistics:
        _use_running_statistics()
    if spec.takes_turns:
        _form_batches_of_ranks(spec.replicas)
    elif spec.replicas > 1:
        _enlarge_batches(spec.replicas)
    if spec.weighs_rows:
        _weigh_losses()
    if not spec.scales_losses:
        _scale_nothing()
    if spec.orders_alike:
        _order_alike()
    if spec.draws_alike:
        draw_alike()
    if spec.is_float64:
        torch.set_default_dtype(torch.float64)
        _convert_batches()


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the function `owner.name` by what `make` returns for it."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def _remove_dropout() -> None:
    def with_p_0(original: Any) -> Any:
        def dropout(input: torch.Tensor, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:  # noqa: A002, ARG001
            return original(input, 0.0, *args, **kwargs)

        return dropout

    def attention_with_p_0(original: Any) -> Any:
        signature = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

        def attention(*args: Any, **kwargs: Any) -> Any:
            named = dict(zip(signature, args, strict=False)) | kwargs
            return original(**{**named, "dropout_p": 0.0})

        return attention

    def init_with_p_0(original: Any) -> Any:
        def init(module: Any, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            module.dropout = 0.0

        return init

    for name in DROPOUTS:
        _replace(functional, name, with_p_0)
    _replace(functional, "scaled_dot_product_attention", attention_with_p_0)
    _replace(torch.nn.RNNBase, "__init__", init_with_p_0)


def _use_running_statistics() -> None:
    def without_training(original: Any) -> Any:
        def batch_norm(
            input: torch.Tensor,  # noqa: A002
            running_mean: Any,
            running_var: Any,
            weight: Any = None,
            bias: Any = None,
            training: bool = False,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            training = training and running_mean is None
            return original(input, running_mean, running_var, weight, bias, training, *args, **kwargs)

        return batch_norm

    _replace(functional, "batch_norm", without_training)


def _order_alike() -> None:
    num_orders: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def seeded(original: Any) -> Any:
        def iterate(sampler: Any) -> Any:
            number = num_orders[sampler] = num_orders.get(sampler, 0) + 1
            sampler.generator = torch.Generator().manual_seed(number)
            return original(sampler)

        return iterate

    _replace(RandomSampler, "__iter__", seeded)


def _scale_nothing() -> None:
    def disabled(original: Any) -> Any:
        def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            scaler._enabled = False

        return init

    _replace(torch.amp.GradScaler, "__init__", disabled)


def _enlarge_batches(replicas: int) -> None:
    """Make every batch `replicas` times as large, as large as those of so many ranks together."""

    def with_larger_size(original: Any) -> Any:
        def init(sampler: Any, inner: Any, batch_size: int, *args: Any, **kwargs: Any) -> None:
            original(sampler, inner, batch_size * replicas, *args, **kwargs)

        return init

    _replace(BatchSampler, "__init__", with_larger_size)


def _form_batches_of_ranks(replicas: int) -> None:
    """Let one process get the batches that `replicas` ranks get: the first of rank 0, the first of rank 1, ..."""

    def by_turns(original: Any) -> Any:
        def iterate(sampler: Any) -> Iterator[list[int]]:
            inner = sampler.sampler
            if not isinstance(inner, DistributedSampler) or inner.num_replicas != 1:
                yield from original(sampler)
                return
            order = divide(list(inner), replicas, drop_last=inner.drop_last)
            for begin in range(0, len(order[0]), sampler.batch_size):
                batches = [part[begin : begin + sampler.batch_size] for part in order]
                if len(batches[0]) == sampler.batch_size or not sampler.drop_last:
                    yield from batches

        return iterate

    def with_all(original: Any) -> Any:
        def length(sampler: Any) -> int:
            inner = sampler.sampler
            if not isinstance(inner, DistributedSampler) or inner.num_replicas != 1:
                return int(original(sampler))
            round_ = math.floor if inner.drop_last else math.ceil
            num = round_(len(inner) / replicas) / sampler.batch_size
            return replicas * int(math.floor(num) if sampler.drop_last else math.ceil(num))

        return length

    _replace(BatchSampler, "__iter__", by_turns)
    _replace(BatchSampler, "__len__", with_all)


def divide(order: list[int], replicas: int, *, drop_last: bool) -> list[list[int]]:
    """Divide `order` into the parts of `replicas` ranks, as torch's DistributedSampler does."""
    missing = -len(order) % replicas
    if missing and drop_last:
        order = order[: len(order) - len(order) % replicas]
    elif missing:
        order = order + (order * math.ceil(missing / len(order)))[:missing]
    return [order[rank::replicas] for rank in range(replicas)]


def _weigh_losses() -> None:
    """Multiply what `backward` starts from by the rank's share of the rows that the ranks' models got. Collective."""
    rows: list[int] = []

    def note_rows(_: torch.nn.Module, args: Any) -> None:
        if not rows and torch.is_grad_enabled():
            rows.append(num_rows_of(list(args)) or 0)

    def weighted(original: Any) -> Any:
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            is_loss = isinstance(tensors, torch.Tensor) and tensors.numel() == 1 and grad_tensors is None
            if is_loss and rows and dist.is_initialized():
                total = torch.tensor(float(rows[0]), device=tensors.device)
                dist.all_reduce(total)
                grad_tensors = torch.full_like(tensors, rows[0] * dist.get_world_size()) / total
            rows.clear()
            original(tensors, grad_tensors, *args, **kwargs)

        return backward

    torch.nn.modules.module.register_module_forward_pre_hook(note_rows)
    _replace(torch.autograd, "backward", weighted)


def _convert_batches() -> None:
    def in_float64(original: Any) -> Any:
        return lambda iterator: _as_float64(original(iterator))

    _replace(torch_loader._BaseDataLoaderIter, "__next__", in_float64)


def _as_float64(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.double() if data.is_floating_point() else data
    parts = get_parts(data)
    return data if parts is None else replace_parts(data, [_as_float64(part) for part in parts])
