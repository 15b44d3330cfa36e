# SPDX-License-Identifier: Apache-2.0
"""Evaluates, predicts or computes BatchNorm statistics over a whole dataset, each sample once, at any world_size."""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from ddpilot.data.nested import check_rows, join_named_rows, take_rows, to_device, to_host
from ddpilot.errors import LoopError
from ddpilot.group.device import broadcast_tensors, fork_rng
from ddpilot.group.process_group import Group
from ddpilot.group.protocol import GroupLike
from ddpilot.training.batch_groups import CurrentBatch, LimitedLoader, Loader, iterate_groups
from ddpilot.training.evaluation.metrics import (
    MeanOf,
    compute,
    divides_range,
    is_collection,
    make_meters,
    naming_metric,
)
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.models.strategy import strategy_of


@contextmanager
def evaluation_mode(model: nn.Module, group: GroupLike) -> Iterator[nn.Module]:
    """Yield the unwrapped model with rank 0's buffers, in `eval()` mode and without gradients. Collective.

    Afterwards the mode of every layer, including layers that the user put into `eval()`, and the random states of
    `random`, NumPy and torch are restored: what draws random numbers in an evaluation, on ranks that have samples, does
    not change the training that follows.
    """
    inner = unwrap(model)
    broadcast_tensors(inner.buffers(), group)
    try:
        with fork_rng([group.device]), in_mode(inner, training=False), torch.no_grad():
            yield inner
    finally:
        strategy_of(inner).settle()


def rows_to_run(model: nn.Module | None, batch: CurrentBatch, group: GroupLike) -> Any:
    """Return the data on which this rank runs `model` for `batch`, on the device; None if it need not run.

    If a forward pass is collective, as always with None, a rank without samples runs it on those of a different rank,
    whose outputs do not count. Collective then, if some rank has no samples.
    """
    data = batch.data if batch.count else None
    if batch.has_empty_rank and (model is None or strategy_of(model).forward_is_collective):
        of_ranks = group.all_gather_object(data)
        data = next(one for one in of_ranks if one is not None) if data is None else data
    return None if data is None else to_device(data, group.device)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Run the block with `model.train(training)`, then restore the mode of each layer."""
    modes = [(layer, layer.training) for layer in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for layer, was_training in modes:
            layer.training = was_training


def evaluate(
    model: nn.Module,
    loader: Loader,
    metrics: Any,
    group: GroupLike,
    forward: Callable[[nn.Module, Any], tuple[Any, ...]] | None = None,
) -> dict[str, Any]:
    """Return the value of each metric over all samples of `loader`; see `Loop.evaluate`. Collective."""
    if not isinstance(metrics, Mapping) and not is_collection(metrics):
        raise LoopError(
            "evaluating",
            found=f"`metrics` is a {type(metrics).__name__}",
            fix='Give a dict: {"accuracy": metric}.',
        )
    meters = make_meters(metrics, group.device)
    needs_range = group.world_size > 1 and any(meter.needs_range for meter in meters.values())
    with evaluation_mode(model, group) as inner:
        for batch in iterate_groups(loader, group, epoch=0):
            arguments = None
            data = rows_to_run(inner, batch, group)
            if data is not None:
                outputs = (forward or forward_batch)(inner, data)
                arguments = outputs if batch.count else None
            is_divided = needs_range and divides_range(arguments, group)
            for (name, *_), meter in meters.items():
                with naming_metric(name, batch.index):
                    if arguments is not None:
                        meter.update(arguments, batch.count)
                    meter.end_batch(group, is_divided)
    return compute(meters, group)


def evaluate_step(
    model: nn.Module, loader: Loader, step: Callable[[nn.Module, Any], Any], group: GroupLike
) -> dict[str, float]:
    """Return the means over `loader` of what `step` returns for each batch; see `Loop.evaluate`. Collective."""
    given: object = step
    if not callable(given):
        found = f"`step` is a {type(given).__name__}"
        raise LoopError("evaluating", found=found, fix="Give a function of (model, batch) that returns means by name.")
    means = MeanOf("step", lambda result: result if isinstance(result, Mapping) else {"loss": result})
    with evaluation_mode(model, group) as inner:
        for batch in iterate_groups(loader, group, epoch=0):
            data = rows_to_run(inner, batch, group)
            result = None if data is None else step(inner, data)
            if batch.count:
                with naming_metric("step", batch.index):
                    means.update((result,), batch.count)
    return means.means(group)


def forward_batch(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Return (output, target) for a batch. Raises LoopError if it has no target.

    For a tuple `(*inputs, target)`: `model(*inputs)` and the target. For a mapping: `model(**batch)` and the batch
    itself, for models that return their own loss.
    """
    if isinstance(batch, Mapping):
        return model(**batch), batch
    if isinstance(batch, list | tuple) and len(batch) > 1:
        return model(*batch[:-1]), batch[-1]
    raise LoopError(
        "running the model on a batch",
        found=f"it is a {type(batch).__name__}{' of one item' * isinstance(batch, list | tuple)}: there is no target",
        fix="Pass `forward=lambda model, batch: (output, target)`.",
    )


def predict_batch(model: nn.Module, batch: Any) -> Any:
    """Return the output for a batch, as `forward_batch` does; a batch without a target is passed to the model whole."""
    if isinstance(batch, list | tuple) and len(batch) == 1:
        return model(batch[0])
    return forward_batch(model, batch)[0] if isinstance(batch, list | tuple | Mapping) else model(batch)


_DID = "predicting"


def predict(
    model: nn.Module,
    loader: Loader,
    group: GroupLike,
    *,
    to: str | os.PathLike[str] | None = None,
    on_all_ranks: bool = False,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Any:
    """Implement `Loop.predict`. Collective. An I/O error on rank 0 is raised on all ranks, at the end."""
    sink: _InMemory | _InFolder | None = None
    failure: Exception | None = None
    if group.is_rank_zero or (on_all_ranks and to is None):
        sink, failure = _open(to)
    with evaluation_mode(model, group) as inner:
        for batch in iterate_groups(loader, group, epoch=0):
            piece = None
            data = rows_to_run(inner, batch, group)
            output = None if data is None else (forward or predict_batch)(inner, data)
            if batch.count:
                check_rows(output, batch.count, f"{_DID} batch {batch.index}")
                piece = to_host(output), batch.sample_ids.tolist()
            given = _exchange(piece, group, on_all_ranks and to is None)
            pieces = {f"rank {rank}": part for rank, part in enumerate(given) if part is not None}
            if sink is None or not pieces:
                continue
            rows, ids = zip(*pieces.values(), strict=True)
            joined = join_named_rows(rows, list(pieces), f"{_DID} batch {batch.index}")
            try:
                sink.add(joined, [number for some in ids for number in some])
            except (OSError, LoopError) as error:  # the other ranks continue, and so must this rank
                sink.discard()
                sink, failure = None, error
    return _finish(sink, failure, group, to)


def _open(to: str | os.PathLike[str] | None) -> tuple[_InMemory | _InFolder | None, Exception | None]:
    if to is None:
        return _InMemory(), None
    try:
        return _InFolder(Path(to)), None
    except (OSError, LoopError) as error:
        return None, error


def _exchange(piece: Any, group: GroupLike, on_all_ranks: bool) -> list[Any]:
    if group.world_size == 1:
        return [piece]
    if on_all_ranks or not isinstance(group, Group):
        return group.all_gather_object(piece)
    pieces: list[Any] | None = [None] * group.world_size if group.is_rank_zero else None
    dist.gather_object(piece, pieces, dst=0, group=group.process_group)
    return pieces or []


def _finish(sink: _InMemory | _InFolder | None, failure: Exception | None, group: GroupLike, to: Any) -> Any:
    value = None
    if sink is not None and failure is None:
        try:
            value = sink.finish()
        except OSError as error:
            sink.discard()
            failure = error
    if to is None:
        if failure is not None:
            raise failure
        return value
    report: tuple[str, str] | None = None  # found and fix, for the error on all ranks
    if isinstance(failure, LoopError):
        report = failure.found, failure.fix
    elif failure is not None:
        fix = "Pass a directory that does not exist yet and that rank 0 can write to, on a disk with free space."
        report = f"{type(failure).__name__}: {failure}", fix
    report = group.broadcast_object(report) if group.world_size > 1 else report
    if report is not None:
        raise LoopError(f"{_DID} into {Path(to)}", found=report[0], fix=report[1], rank=0) from failure
    return Path(to)


class _InMemory:
    """Keeps all outputs in memory."""

    def __init__(self) -> None:
        self._outputs: list[Any] = []
        self._sample_ids: list[int] = []

    def add(self, output: Any, sample_ids: list[int]) -> None:
        self._outputs.append(output)
        self._sample_ids += sample_ids

    def finish(self) -> Any:
        """Return all rows in dataset order; None if there were no samples."""
        if not self._outputs:
            return None
        names = [f"batch {number}" for number in range(len(self._outputs))]
        joined = join_named_rows(self._outputs, names, _DID)
        rows = sorted(range(len(self._sample_ids)), key=self._sample_ids.__getitem__)
        return joined if rows == list(range(len(rows))) else take_rows(joined, rows)

    def discard(self) -> None:
        """Drop all outputs."""
        self._outputs, self._sample_ids = [], []


class _InFolder:
    """Writes each global batch to a file; the directory is renamed to its final name when it is complete."""

    def __init__(self, folder: Path) -> None:
        if folder.exists():
            raise LoopError(_DID, found=f"{folder} exists already", fix="Remove it or choose a different name.")
        self._folder = folder
        self._unfinished = folder.with_name(f".{folder.name}.unfinished-{os.getpid()}")
        self._unfinished.mkdir(parents=True)
        self._last_id = -1
        self._sizes: list[int] = []

    def add(self, output: Any, sample_ids: list[int]) -> None:
        if any(number <= before for before, number in pairwise([self._last_id, *sample_ids])):
            raise LoopError(
                f"{_DID} into a folder",
                found="samples that are not in the order of the dataset, in which they have to be written",
                fix="Use a loader with shuffle=False and without weights.",
            )
        data = io.BytesIO()
        torch.save({"output": output, "sample_ids": sample_ids}, data)
        # Not written by torch.save, whose error for a full disk only names an unexpected file position.
        (self._unfinished / _part(len(self._sizes))).write_bytes(data.getbuffer())
        self._last_id = sample_ids[-1]
        self._sizes.append(len(sample_ids))

    def finish(self) -> Path:
        """Rename the directory to its final name and return its path."""
        (self._unfinished / "sizes.json").write_text(json.dumps(self._sizes))
        self._unfinished.rename(self._folder)
        return self._folder

    def discard(self) -> None:
        """Remove the unfinished directory."""
        shutil.rmtree(self._unfinished, ignore_errors=True)


def read_predictions(folder: str | os.PathLike[str]) -> Iterator[Any]:
    """Yield the outputs written by `Loop.predict(..., to=folder)`, one global batch at a time, in order.

    Tensors keep their dtypes. Only plain Python objects load (`torch.load` with `weights_only=True`).
    """
    sizes = json.loads((Path(folder) / "sizes.json").read_text())
    for number in range(len(sizes)):
        yield cast(dict[str, Any], torch.load(Path(folder) / _part(number), weights_only=True))["output"]


def _part(number: int) -> str:
    return f"batch-{number:08d}.pt"


def update_batch_norm(
    model: nn.Module,
    loader: Loader,
    group: GroupLike,
    *,
    epoch: int = 0,
    max_batches: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> None:
    """Compute the statistics of all BatchNorm layers over `loader`; see `Loop.update_batch_norm`. Collective."""
    inner = unwrap(model)
    inner = inner.module if isinstance(inner, AveragedModel) else inner
    limited = loader if max_batches is None else LimitedLoader(loader, max_batches)
    with fork_rng([group.device]), in_mode(inner, training=True), torch.no_grad():
        layers = [
            one for one in inner.modules() if isinstance(one, _BatchNorm) and one.track_running_stats and one.training
        ]
        if not layers:
            return
        for layer in layers:
            layer.reset_running_stats()
        with _replaced_forwards(layers, state := _Batch(group)):
            for batch in iterate_groups(limited, group, epoch=epoch):
                state.batch = batch
                (forward or predict_batch)(inner, rows_to_run(None, batch, group))
        strategy_of(inner).settle()


class _Batch:
    """The current batch, as the layers see it."""

    def __init__(self, group: GroupLike) -> None:
        self.group = group
        self.batch: CurrentBatch | None = None
        self.num_seen: dict[nn.Module, int] = {}


@contextmanager
def _replaced_forwards(layers: list[_BatchNorm], state: _Batch) -> Iterator[None]:
    before = [layer.__dict__.get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.__dict__["forward"] = functools.partial(_forward, layer, state)
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            del layer.__dict__["forward"]
            if own is not None:
                layer.__dict__["forward"] = own


def _forward(layer: _BatchNorm, state: _Batch, x: torch.Tensor) -> torch.Tensor:
    """Normalize by the statistics of all ranks' rows, and add them to the cumulative average. Collective."""
    assert state.batch is not None  # set before each forward pass
    assert layer.running_mean is not None  # `track_running_stats` is True
    assert layer.running_var is not None
    layer._check_input_dim(x)  # type: ignore[no-untyped-call]
    mean, squares, count = _joint_moments(x, state.group, counts=bool(state.batch.count))
    if count < 2:
        found = f"batch {state.batch.index} has a single value per channel on all ranks together"
        fix = "Use drop_last=True, or a batch size without a last batch of one."
        raise LoopError("updating BatchNorm statistics", found=found, fix=fix)
    number = state.num_seen[layer] = state.num_seen.get(layer, 0) + 1
    dtype = layer.running_mean.dtype
    layer.running_mean.lerp_(mean.to(dtype), 1 / number)
    layer.running_var.lerp_((squares / (count - 1)).to(dtype), 1 / number)
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked += 1
    return nn.functional.batch_norm(
        x, mean.to(dtype), (squares / count).to(dtype), layer.weight, layer.bias, False, 0.0, layer.eps
    )


def _joint_moments(x: torch.Tensor, group: GroupLike, *, counts: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return mean and sum of squared deviations per channel, shape (channels,), and the values per channel.

    Over the rows of all ranks; those of this rank are left out unless it `counts`.
    """
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    rows, channels = x.to(wide).transpose(0, 1).flatten(1), x.shape[1]
    table = torch.zeros(group.world_size, 1 + 2 * channels, dtype=wide, device=x.device)
    if counts and rows.shape[1]:
        own = rows.mean(1)
        deviations = (rows - own[:, None]).square().sum(1)
        table[group.rank] = torch.cat([own.new_tensor([rows.shape[1]]), own, deviations])
    if group.world_size > 1:
        table = group.all_reduce(table)
    nums, means, squares = table[:, :1], table[:, 1 : 1 + channels], table[:, 1 + channels :]
    count = max(1, round(nums.sum().item()))
    mean = (nums * means).sum(0) / count
    return mean, (squares + nums * (means - mean).square()).sum(0), count
