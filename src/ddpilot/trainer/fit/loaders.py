# SPDX-License-Identifier: Apache-2.0
"""The loaders of a fit's training data and validation sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ddpilot.data.options import WORKER_OPTIONS
from ddpilot.data.shards.dataset import is_dataset_of_shards
from ddpilot.errors import LoopError
from ddpilot.trainer.fit_options import SIZES, FitOptions
from ddpilot.training.batches import LimitedLoader, Loader
from ddpilot.training.loop import Loop

_OF_VALIDATION = (*SIZES, "collate_fn", *WORKER_OPTIONS)
"""Options that the loader of a validation set has from that of the training data."""


def make_loaders(fit: FitOptions, loop: Loop) -> tuple[Loader, dict[str, Loader]]:
    """Return the loader of the training data, and those of the validation sets by name."""
    train = make_loader_of(fit.train_set, loop, fit.loader)
    options = {name: value for name, value in fit.loader.items() if name in _OF_VALIDATION}
    if isinstance(fit.train_set, DataLoader):
        options |= {"global_batch_size": fit.train_set.batch_size, "batch_size_per_rank": None}
    val = {
        name: make_loader_of(data, loop, {} if isinstance(data, DataLoader) else options)
        for name, data in fit.val_sets.items()
    }
    return train, val


def limit_loaders(loaders: tuple[Loader, dict[str, Loader]], fit: FitOptions) -> tuple[Loader, dict[str, Loader]]:
    """Return `loaders` up to the limits of `overfit_batches` and `limit_batches`."""
    (train, val), limits = loaders, fit.limit_batches
    if fit.overfit_batches is not None:
        train = LimitedLoader(train, fit.overfit_batches, is_fixed=True)
    if "train" in limits:
        train = LimitedLoader(train, limits["train"])
    if "validation" in limits:
        val = {name: LimitedLoader(one, limits["validation"]) for name, one in val.items()}
    return train, val


def make_loader_of(data: Any, loop: Loop, options: Mapping[str, Any]) -> Loader:
    """Return this rank's loader of `data`. Not collective. Raises DataError and LoopError.

    `options`: those of `LoaderOptions`, with a batch size for a dataset; a DataLoader has its own, and its own workers
    and order.
    """
    if hasattr(data, "iterate"):
        made: Loader = data
        return made
    if isinstance(data, DataLoader):
        return loop.prepare_data_loader(data, **_options_of_loader(data, options))
    is_stream = isinstance(data, IterableDataset) and not is_dataset_of_shards(data)
    return loop.loader(data, **{name: one for name, one in options.items() if not is_stream or name != "shuffle"})


def _options_of_loader(data: DataLoader[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: size for name in SIZES if (size := options.get(name)) is not None}
    for name, size in given.items():
        if size != data.batch_size:
            raise LoopError(
                "preparing a DataLoader",
                found=f"`{name}={size}`, and the loader has `batch_size={data.batch_size}`",
                fix=f"Leave `{name}` out, or give the dataset instead of the loader.",
            )
    kept = {name: value for name, value in options.items() if name not in ("shuffle", "num_workers", *SIZES)}
    return {**kept, "batch_size_per_rank": "batch_size_per_rank" in given}
