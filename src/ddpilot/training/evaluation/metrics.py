# SPDX-License-Identifier: Apache-2.0
"""Evaluates metrics so that every sample counts once: callables, and torchmetrics objects if it is installed."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from ddpilot.data.nested import join_rows, to_device, to_host
from ddpilot.errors import LoopError
from ddpilot.group.device import wire_device
from ddpilot.group.protocol import GroupLike


class Meter(Protocol):
    """Accumulates one metric over the batches of an evaluation."""

    @property
    def needs_range(self) -> bool:
        """True if the metric depends on whether a whole batch is in [0, 1]; `end_batch` then needs `is_divided`."""

    def update(self, arguments: tuple[Any, ...], count: int, /) -> None:
        """Add this rank's `count` samples of a batch; not called if it has none."""

    def end_batch(self, group: GroupLike, is_divided: bool) -> None:
        """Finish a global batch; called on every rank. May be collective.

        `is_divided`: True if the outputs of some ranks are in [0, 1] and those of others are not.
        """

    def compute(self, group: GroupLike, /) -> Any:
        """Return the value over all samples of all ranks, the same on every rank. Collective."""


def make_meters(metrics: Any, device: torch.device) -> dict[tuple[str, ...], Meter]:
    """Return a meter for each metric, by name; for a metric of a collection under a name, by both names.

    `metrics`: a mapping or a torchmetrics MetricCollection. Raises LoopError unless each is a callable or has
    torchmetrics' methods.
    """
    meters: dict[tuple[str, ...], Meter] = {}
    for name, metric in _items(metrics) if is_collection(metrics) else metrics.items():
        if is_collection(metric):
            meters |= {(name, part): _make(part, one, device) for part, one in _items(metric)}
        else:
            meters[name,] = _make(name, metric, device)
    return meters


def compute(meters: Mapping[tuple[str, ...], Meter], group: GroupLike) -> dict[str, Any]:
    """Return the values of `meters`, with a dict for each collection under a name. Collective."""
    values: dict[str, Any] = {}
    for (name, *part), meter in meters.items():
        value = meter.compute(group)
        if part:
            values.setdefault(name, {})[part[0]] = value
        else:
            values[name] = value
    return values


def is_collection(metrics: Any) -> bool:
    """True for a MetricCollection, which holds metrics by name and computes them together."""
    return hasattr(metrics, "compute_groups") and hasattr(metrics, "add_metrics") and hasattr(metrics, "items")


def _items(collection: Any) -> list[tuple[str, Any]]:
    # A clone, since a metric of a compute group may refer to the states of a different one.
    return list(collection.clone().items(keep_base=False, copy_state=True))


@contextmanager
def naming_metric(name: str, batch: int) -> Iterator[None]:
    """Raise an exception of the metric `name` as LoopError with the batch, from the original exception."""
    try:
        yield
    except LoopError as error:
        did = f"{error.did} for batch {batch}"
        raise LoopError(did, found=error.found, fix=error.fix) from error.__cause__
    except Exception as error:
        raise LoopError(
            f"evaluating the metric {name!r} for batch {batch}",
            found=f"it raised {type(error).__name__}: {error}",
            fix="It is called with what `forward` returns, (output, target) by default, for this rank's samples.",
        ) from error


def _make(name: str, metric: Any, device: torch.device) -> Meter:
    if all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset", "clone")):
        own = metric.clone().to(device)
        own.reset()
        for part in [own, *_parts(own)]:
            part.distributed_available_fn = lambda: False  # torchmetrics' own sync would count samples twice
        return MergedMetric(own) if _can_merge(own) else GatheredMetric(own, device)
    if callable(metric):
        return MeanOf(name, metric)
    raise LoopError(
        f"evaluating the metric {name!r}",
        found=f"it is a {type(metric).__name__}",
        fix="Give a torchmetrics metric, or a function of (output, target) that returns a value per sample or a mean.",
    )


def _can_merge(metric: Any) -> bool:
    """True if the ranks' states can be merged exactly, with torchmetrics' `merge_state`.

    Not for means, which `merge_state` weights by the number of updates instead of samples, nor for metrics that wrap
    others.
    """
    joins = {"dim_zero_sum", "dim_zero_cat", "dim_zero_max", "dim_zero_min"}
    reductions = [getattr(one, "__name__", "") for one in getattr(metric, "_reductions", {"": None}).values()]
    says_so = metric.full_state_update is False and not metric.dist_sync_on_step
    # A metric without `data_range` (SSIM) uses the range of each batch.
    says_so &= getattr(metric, "data_range", 1.0) is not None
    return says_so and bool(reductions) and set(reductions) <= joins and not _parts(metric)


def divides_range(arguments: tuple[Any, ...] | None, group: GroupLike) -> bool:
    """True if the outputs of some ranks are in [0, 1] and those of others are not. The same on all ranks. Collective.

    `arguments`: the arguments of the metrics for this rank's part of a batch, the output first; None without samples.
    """
    flags = torch.zeros(2, device=wire_device(group))
    output = arguments[0] if arguments else None
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        flags[int(((output >= 0) & (output <= 1)).all())] = 1
    return bool(group.all_reduce(flags).min() > 0)


def _parts(metric: Any) -> list[Any]:
    """Return the metrics inside a metric that wraps others."""
    modules = metric.modules() if isinstance(metric, torch.nn.Module) else []
    return [module for module in modules if module is not metric and hasattr(module, "distributed_available_fn")]


class MeanOf:
    """The mean of a function over samples, from its values per sample or from batch means weighted by their counts.

    If it returns (mean, count), that count is the weight, e.g. of tokens. Of a dict of values, the result is the sum.
    """

    needs_range = False

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._function = function
        self._sums: dict[str, tuple[float, float]] = {}

    def update(self, arguments: tuple[Any, ...], count: int) -> None:
        result = self._function(*arguments)
        for name, part in result.items() if isinstance(result, Mapping) else [("", result)]:
            self._add(str(name), part, count)

    def _add(self, name: str, result: Any, count: int) -> None:
        mean, weight = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(mean, torch.Tensor | np.ndarray | np.generic | numbers.Number | list):
            raise LoopError(
                f"evaluating the metric {self._name!r}",
                found=f"it returned {result!r:.60}, a {type(result).__name__}",
                fix="Return one value per sample, their mean as a scalar, or (mean, count).",
            )
        value = torch.as_tensor(mean).detach().to(device="cpu", dtype=torch.float64)
        if value.ndim and (len(value) != count or weight is not None):
            raise LoopError(
                f"evaluating the metric {self._name!r}",
                found=f"a tensor of shape {tuple(value.shape)} for {count} samples",
                fix="Return one value per sample, their mean as a scalar, or (mean, count).",
            )
        if weight is not None:
            number = float(weight)  # a product with a count tensor would be 32-bit
            total = value.item() * number if number else 0.0
        else:
            number = float(count)
            total = value.reshape(count, -1).mean(dim=1).sum().item() if value.ndim else value.item() * number
        before, others = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = before + total, others + number

    def end_batch(self, group: GroupLike, is_divided: bool) -> None:
        """Do nothing."""

    def compute(self, group: GroupLike) -> float:
        means = [total / count for total, count in self._totals(group).values() if count]
        return sum(means) if means else float("nan")

    def means(self, group: GroupLike) -> dict[str, float]:
        """Return the mean of each name that the function returned, NaN if it is over nothing. Collective."""
        return {name: total / count if count else float("nan") for name, (total, count) in self._totals(group).items()}

    def _totals(self, group: GroupLike) -> dict[str, tuple[float, float]]:
        of_ranks = group.all_gather_object(self._sums) if group.world_size > 1 else [self._sums]
        names = dict.fromkeys(name for one in of_ranks for name in one)
        parts = [[one[name] for one in of_ranks if name in one] for name in names]
        return {
            name: (sum(total for total, _ in part), sum(count for _, count in part))
            for name, part in zip(names, parts, strict=True)
        }


class MergedMetric:
    """A torchmetrics metric whose states are merged at the end: each rank updates it with its own samples."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._waiting: tuple[Any, ...] | None = None
        # These treat a batch with all outputs in [0, 1] as probabilities, and any other as logits.
        kinds = type(metric).__mro__
        self.needs_range = any(kind.__module__.startswith("torchmetrics.classification") for kind in kinds)

    def update(self, arguments: tuple[Any, ...], _count: int, /) -> None:
        self._waiting = arguments

    def end_batch(self, group: GroupLike, is_divided: bool) -> None:
        """Update with the batch.

        Collective if the ranks' outputs differ in range: rank 0 then updates with all samples.
        """
        mine, self._waiting = self._waiting, None
        if is_divided and self.needs_range:
            whole = _gather(mine, group)
            mine = whole if group.is_rank_zero else None
        if mine is not None:
            self._metric.update(*to_device(mine, self._metric.device))

    def compute(self, group: GroupLike) -> Any:
        if group.world_size > 1:
            mine = to_host(self._metric.metric_state) if self._metric.update_called else None
            device = self._metric.device
            self._metric.reset()
            for state in group.all_gather_object(mine):
                if state is not None:
                    self._metric.merge_state(to_device(state, device))
                    self._metric._update_count += 1  # otherwise compute() warns that update() was not called
        return plain(self._metric.compute())


class GatheredMetric:
    """Any other torchmetrics metric: every rank updates it with all samples of a batch, in dataset order."""

    needs_range = False

    def __init__(self, metric: Any, device: torch.device) -> None:
        self._metric = metric
        self._device = device
        self._waiting: tuple[Any, ...] | None = None

    def update(self, arguments: tuple[Any, ...], _count: int, /) -> None:
        self._waiting = arguments

    def end_batch(self, group: GroupLike, is_divided: bool) -> None:  # noqa: ARG002  (it has the whole batch)
        """Gather the batch's arguments and update with them. Collective."""
        mine, self._waiting = self._waiting, None
        whole = _gather(mine, group) if group.world_size > 1 else mine
        if whole is not None:
            self._metric.update(*to_device(whole, self._device))

    def compute(self, _group: GroupLike, /) -> Any:
        return plain(self._metric.compute())


def _gather(mine: tuple[Any, ...] | None, group: GroupLike) -> Any:
    """Return the arguments of all ranks for a batch, in dataset order, on the CPU; None without samples. Collective."""
    parts = group.all_gather_object(None if mine is None else to_host(mine))
    present = [part for part in parts if part is not None]
    return join_rows(present) if present else None


def plain(value: Any) -> Any:
    """Return a metric's value with 0-dim tensors as numbers and other tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.ndim == 0 else value.detach().cpu()
    return {key: plain(part) for key, part in value.items()} if isinstance(value, dict) else value
