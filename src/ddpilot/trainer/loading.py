# SPDX-License-Identifier: Apache-2.0
"""Make this rank's loader from a dataset, a DataLoader, or a ddpilot loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ddpilot.data.loaders import make_loader, make_stream_loader
from ddpilot.data.shard import shard_loader
from ddpilot.errors import LoopError
from ddpilot.group.protocol import GroupLike
from ddpilot.training.batches import Loader

NO_SIZES: Mapping[str, int | None] = {"global_batch_size": None, "batch_size_per_rank": None}


def make_loader_of(
    data: Any,
    group: GroupLike,
    seed: int,
    sizes: Mapping[str, int | None],
    options: Mapping[str, Any],
    say: Callable[[str], None] | None = None,
) -> Loader:
    """Return this rank's loader of `data`. Not collective. Raises DataError and LoopError.

    `sizes`: `global_batch_size` and `batch_size_per_rank`; a dataset needs one of them, a DataLoader has its own.
    `options`: those of `make_loader` or `make_stream_loader`, or of `shard_loader` for a DataLoader, without `shuffle`
    and `num_workers`. `say` prints the batch size that a DataLoader results in.
    """
    if hasattr(data, "iterate"):
        made: Loader = data
        return made
    job: dict[str, Any] = {"rank": group.rank, "world_size": group.world_size, "seed": seed}
    if isinstance(data, DataLoader):
        return shard_loader(data, **_options_of_loader(data, sizes, options), **job, say=say)
    if isinstance(data, IterableDataset):
        left = {name: value for name, value in options.items() if name != "shuffle"}
        return make_stream_loader(data, **{**sizes, **left, **job})
    return make_loader(data, **{**sizes, **options, **job})


def _options_of_loader(
    data: DataLoader[Any], sizes: Mapping[str, int | None], options: Mapping[str, Any]
) -> dict[str, Any]:
    given = sizes["global_batch_size"]
    per_rank = sizes["batch_size_per_rank"]
    has = data.batch_size
    if (given is not None and given != has) or (per_rank is not None and per_rank != has):
        name = "global_batch_size" if given is not None else "batch_size_per_rank"
        raise LoopError(
            "sharding a DataLoader",
            found=f"`{name}={given or per_rank}`, and the loader has `batch_size={has}`",
            fix=f"Leave `{name}` out, or give the dataset instead of the loader.",
        )
    kept = {name: value for name, value in options.items() if name not in ("shuffle", "num_workers")}
    return {**kept, "batch_size_per_rank": per_rank is not None}
