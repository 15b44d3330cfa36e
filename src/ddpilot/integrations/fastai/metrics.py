# SPDX-License-Identifier: Apache-2.0
"""Compute metrics and predictions over all samples, each counted once, on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from fastai.learner import AvgLoss, AvgMetric, AvgSmoothLoss, ValueMetric
from fastai.torch_core import to_concat, to_detach, to_device

from ddpilot.group.process_group import Group
from ddpilot.integrations.fastai.loaders import Share
from ddpilot.integrations.libraries import replace

_AVERAGES = (AvgMetric, AvgLoss)
_NOT_COUNTED = (AvgSmoothLoss, ValueMetric)  # made of losses that are equal on all ranks; not computed from batches
_COLLECTED = ("inputs", "preds", "targets", "losses")


def needs_whole_batches(metrics: Iterable[Any]) -> bool:
    """Return True if one of `metrics` is not a mean over samples, such as F1.

    Such metrics are updated with the whole batch on every rank, as in one process.
    """
    return any(not isinstance(metric, (*_AVERAGES, *_NOT_COUNTED)) for metric in metrics)


def reduce_metrics(metrics: Iterable[Any], group: Group) -> None:
    """Reduce those of `metrics` that are means over samples, so that they cover the samples of all ranks. Collective.

    Does nothing if `needs_whole_batches(metrics)`, as every rank has then counted all samples.
    """
    metrics = list(metrics)
    if needs_whole_batches(metrics):
        return
    for metric in metrics:
        if isinstance(metric, _AVERAGES):
            total = torch.as_tensor(metric.total, dtype=torch.float64)
            parts = group.all_gather_object((total, metric.count))
            metric.total = torch.stack([part for part, _ in parts]).sum(0)
            metric.count = sum(count for _, count in parts)


def count_batch(original: Callable[[Any], None], recorder: Any) -> None:
    """Wrap `Recorder.after_batch` on a rank. Collective if a metric needs whole batches."""
    learn = recorder.learn
    if not isinstance(learn.dl, Share) or not len(learn.yb):
        original(recorder)
    elif needs_whole_batches(recorder._train_mets if learn.training else recorder._valid_mets):
        with _whole_batch(learn):
            original(recorder)
    elif learn.dl.own_size:
        original(recorder)
    elif learn.training:  # the loss is that of all ranks, but the sample is counted on a different rank
        with _changed(recorder, train_metrics=False):
            original(recorder)


def collect_predictions(original: Callable[[Any], None], gatherer: Any) -> None:
    """Gather the predictions of all ranks in order, then run `GatherPredsCallback.after_validate`.

    Collective if the learner's loader is a `Share`.
    """
    loader = gatherer.learn.dl
    if isinstance(loader, Share):
        own = {name: getattr(gatherer, name, None) or [] for name in _COLLECTED}
        counted = [sizes[loader.group.rank] > 0 for sizes in loader.sizes]
        kept = {
            name: [piece for piece, is_own in zip(pieces, counted, strict=True) if is_own]
            for name, pieces in own.items()
            if isinstance(pieces, list) and len(pieces) == len(counted)
        }
        by_rank = loader.group.all_gather_object(kept)
        for name in kept:
            setattr(gatherer, name, _in_order([pieces[name] for pieces in by_rank], loader.sizes))
    original(gatherer)


def _in_order(by_rank: list[list[Any]], sizes: list[list[int]]) -> list[Any]:
    pieces = [iter(own) for own in by_rank]
    return [next(pieces[rank]) for batch in sizes for rank, size in enumerate(batch) if size]


@contextlib.contextmanager
def _whole_batch(learn: Any) -> Iterator[None]:
    """Context manager: set the learner's prediction and targets to those of the whole batch. Collective.

    In validation, the loss is also set to that of the whole batch; in training, it already is.
    """
    share: Share = learn.dl
    own = None if not share.own_size else to_detach((learn.pred, tuple(learn.yb), learn.loss.mean()))
    pieces = [piece for piece in share.group.all_gather_object((own, share.own_size)) if piece[1]]
    device = learn.pred.device if isinstance(learn.pred, torch.Tensor) else share.group.device
    changes = {
        "pred": to_device(to_concat([piece[0][0] for piece in pieces]), device),
        "yb": to_device(tuple(to_concat([piece[0][1] for piece in pieces])), device),
    }
    if not learn.training:
        changes["loss"] = sum(piece[0][2] * piece[1] for piece in pieces) / share.whole_size
    with _changed(learn, **changes):
        yield


@contextlib.contextmanager
def _changed(owner: Any, **changes: Any) -> Iterator[None]:
    with contextlib.ExitStack() as until_done:
        for name, value in changes.items():
            replace(until_done, owner, name, value)
        yield
