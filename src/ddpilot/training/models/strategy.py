# SPDX-License-Identifier: Apache-2.0
"""`ParallelStrategy`: what a loop needs to know of the way in which a prepared model runs on several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpilot.checkpoint.safetensors_file import plain_names
from ddpilot.training.models.comm_hooks import average_before_reading
from ddpilot.training.models.ddp import find_ddp
from ddpilot.training.models.sharding import divide_as, gather, has_sharded_layer, reshard, sharded_layers

if TYPE_CHECKING:
    from ddpilot.checkpoint.shard_files import ShardReader


@dataclass(frozen=True)
class ParallelStrategy:
    """How one model runs on several ranks: here alone, or inside DDP as seen without it; in DDP or sharded below."""

    model: nn.Module
    forward_is_collective: ClassVar[bool] = False
    """True if all ranks have to run each forward pass, also those without samples."""

    def without_reduction(self) -> AbstractContextManager[None]:
        """Return the context of a backward pass whose gradients may be exchanged later, with those of the next one."""
        return nullcontext()

    def settle(self) -> None:
        """Drop copies of the weights that the next step would leave outdated. Not collective."""

    def weights(self, *, keeps: bool) -> dict[str, Any]:
        """Return the whole state_dict if `keeps`, else what this rank need not gather. Collective if sharded."""
        del keeps
        return self.model.state_dict()

    def own_weights(self) -> dict[str, Any]:
        """Return the state_dict with this rank's shards, where it is sharded. Collective with `sync_every`."""
        return self.weights(keeps=True)

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Load a whole state_dict, which every rank passes. Not collective."""
        self.model.load_state_dict(weights)


@dataclass(frozen=True)
class DDPStrategy(ParallelStrategy):
    """A model in DistributedDataParallel: every rank has all weights, and backward passes all-reduce gradients."""

    model: DistributedDataParallel

    def without_reduction(self) -> AbstractContextManager[None]:
        """Return `no_sync()`, where DDP can do without the all-reduce."""
        # With static_graph, DDP records the graph in the first backward pass, which fails under no_sync(). The
        # gradients all-reduced then are equal on all ranks, and remain so when the group's last batch all-reduces them
        # again.
        records_graph = self.model.static_graph and not self.model._static_graph_delay_allreduce_enqueued
        return nullcontext() if records_graph else self.model.no_sync()

    def weights(self, *, keeps: bool) -> dict[str, Any]:
        """Return the state_dict of the model inside, on every rank. Collective with `sync_every`."""
        del keeps
        average_before_reading(self.model)
        return self.model.module.state_dict()  # type: ignore[no-any-return]

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Load a state_dict of the model inside."""
        self.model.module.load_state_dict(weights)


@dataclass(frozen=True)
class ShardedStrategy(ParallelStrategy):
    """A model whose parameters are sharded: its gradients are exchanged in every backward pass, also in a group.

    So no rank keeps whole gradients, and gradients that are cleared within a group leave nothing behind.
    """

    forward_is_collective = True

    def settle(self) -> None:
        """Free the parameters that a forward pass without backward has left gathered."""
        reshard(sharded_layers(self.model))

    def weights(self, *, keeps: bool) -> dict[str, Any]:
        """Gather the state_dict, one tensor after the other; {} unless `keeps`. Collective."""
        whole = {name: gather(value, keeps=keeps) for name, value in self.own_weights().items()}
        return whole if keeps else {}

    def own_weights(self) -> dict[str, Any]:
        """Return the state_dict with this rank's shards. Not collective."""
        reshard(sharded_layers(self.model))
        return self.model.state_dict()

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Load this rank's shards of a whole state_dict."""
        reshard(sharded_layers(self.model))
        own = self.model.state_dict()
        self.model.load_state_dict({name: divide_as(own.get(name), value) for name, value in weights.items()})


def strategy_of(model: nn.Module) -> ParallelStrategy:
    """Return the strategy of `model`, prepared or not."""
    ddp = find_ddp(model)
    if ddp is not None:
        return DDPStrategy(ddp)
    inner = getattr(model, "_orig_mod", model)
    return ShardedStrategy(inner) if has_sharded_layer(inner) else ParallelStrategy(model)


def read_weights(model: nn.Module, name: str, matched: Mapping[str, Any], shards: ShardReader) -> None:
    """Read this rank's shards of the weights called `name` into `model`, in place. Not collective.

    `matched`: the state_dict to load, with outlines, on the device "meta", of what is to be read from `shards`.
    """
    own = strategy_of(model).own_weights()
    plain = plain_names(own)
    is_read = {full for full, value in matched.items() if isinstance(value, torch.Tensor) and value.is_meta}
    shards.read_into({(name, plain[full]): own[full] for full in is_read})
    if rest := {full: value for full, value in matched.items() if full not in is_read}:
        strategy_of(model).load_weights({**own, **rest})
