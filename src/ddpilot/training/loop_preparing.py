# SPDX-License-Identifier: Apache-2.0
"""`Loop`'s setup methods: prepare, explain, loader and shard."""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

from ddpilot.data.loaders import ShardedLoader, StreamLoader, make_loader, make_stream_loader
from ddpilot.data.options import naming_rank
from ddpilot.data.shard import shard_loader
from ddpilot.errors import LoopError
from ddpilot.group.accelerator import move
from ddpilot.training.models.ddp import prepare_optimizer, wrap
from ddpilot.training.models.ddp_options import DdpOptions
from ddpilot.training.models.explain import Explanation
from ddpilot.training.resume.tracked_state import has_state
from ddpilot.training.setup import LoopState
from ddpilot.training.step.precision import parameters_of


class PreparingLoop(LoopState):
    """Wraps models in DDP, registers optimizers, and makes loaders of this rank's samples."""

    def prepare(
        self,
        *things: Any,
        comm: Literal["bf16", "fp16"] | None = None,
        shard: Literal["optimizer"] | None = None,
        find_unused_parameters: bool | None = None,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        forward_sync_buffers: bool = False,
        sync_batch_norm: bool = False,
        **more: Any,
    ) -> Any:
        """Move models to the device and, with several ranks, wrap them in DDP; return all objects in order. Collective.

        `things`: models, optimizers, and objects to save with them: schedulers, an `AveragedModel`, anything with
        `state_dict` and `load_state_dict`; one object is returned alone, several as a tuple. Weights and buffers are
        broadcast from rank 0. A returned model has the methods of the original, which run as forward passes of DDP.
        `explain` reports the chosen options and their reasons.

        `comm`: all-reduce gradients in 16 bits. `shard="optimizer"`: each rank keeps the optimizer state of its share
        of the parameters only (ZeroRedundancyOptimizer); use the returned optimizer. `find_unused_parameters`: updates
        may leave parameters unused; None: the variable DDP_FIND_UNUSED_PARAMETERS, False if it is not set.
        `static_graph`: all updates of the training use the same parameters in the same way. `bucket_cap_mb`: bucket
        size in MiB; None: DDP's 25. `gradient_as_bucket_view`: no second copy of gradients. `forward_sync_buffers`:
        rank 0's buffers are broadcast in forward passes too, of which every rank then has to run equally many.
        `sync_batch_norm`: BatchNorm statistics over all ranks, on GPUs only. `more`: further arguments of
        DistributedDataParallel.

        Raises LoopError for objects of other types, for a DDP model, for options that DDP does not have or that a model
        or an optimizer does not support, and for `sync_batch_norm` on the CPU.
        """
        returned = []
        with naming_rank(self.rank):
            options = DdpOptions(
                find_unused_parameters=find_unused_parameters,
                static_graph=static_graph,
                bucket_cap_mb=bucket_cap_mb,
                gradient_as_bucket_view=gradient_as_bucket_view,
                forward_sync_buffers=forward_sync_buffers,
                comm=comm,
                sync_batch_norm=sync_batch_norm,
                more=more,
            )
            earlier = tuple(self._optimizers)
            for thing in things:
                returned.append(self._prepare_thing(thing, options, shard))
                if isinstance(returned[-1], Optimizer):
                    self._replace_optimizers(earlier, returned[-1])
                self._things.add(returned[-1])
        return returned[0] if len(returned) == 1 else tuple(returned)

    def _prepare_thing(self, thing: Any, options: DdpOptions, shard: Literal["optimizer"] | None) -> Any:
        if isinstance(thing, AveragedModel):
            move(thing, self.device)
            return thing
        if isinstance(thing, nn.Module):
            return self._prepare_model(thing, options)
        if isinstance(thing, Optimizer):
            optimizer = prepare_optimizer(thing, self.group, shard)
            if not any(one is optimizer for one in self._optimizers):
                self._optimizers.append(optimizer)
            self._prepared.add_optimizer(optimizer)
            self._updates.groups.watch(optimizer)
            self._updates.shared.watch(optimizer, self._optimizers)
            return optimizer
        if has_state(thing):
            if isinstance(thing, ReduceLROnPlateau):
                self._updates.keep_objective()
            return thing
        raise LoopError(
            "preparing",
            found=f"a {type(thing).__name__}",
            fix="Pass models, optimizers, and what else has a state_dict; datasets go to loop.loader().",
            rank=self.rank,
        )

    def _replace_optimizers(self, earlier: tuple[Optimizer, ...], optimizer: Optimizer) -> None:
        """Replace those of `earlier` whose parameters all belong to `optimizer` now."""
        taken = set(map(id, parameters_of(optimizer)))
        for place, old in enumerate(self._optimizers):
            is_earlier = any(one is old for one in earlier) and old is not optimizer
            if not is_earlier or not taken.issuperset(map(id, parameters_of(old))):
                continue
            rest = [one for one in self._optimizers if one is not old and one is not optimizer]
            self._optimizers = [*rest[:place], optimizer, *rest[place:]]
            self._things.replace(old, optimizer)
            self._prepared.forget_optimizer(old)
            self._updates.groups.forget(old)
            self._replaced = self._replaced or WeakSet()
            self._replaced.add(old)

    def _prepare_model(self, given: nn.Module, options: DdpOptions) -> nn.Module:
        model, choices = wrap(given, self.group, options)
        self._updates.add(model)
        self._trained.remember(self._updates.models)
        self._unprepared.add(model)
        self._drift.add(model)
        self._prepared.add_model(model, choices)
        return model

    def explain(self) -> Explanation:
        """Report the options chosen by `prepare`, with their reasons and costs, and proposals. Collective.

        The report uses what DDP has recorded on all ranks: after about ten updates it includes times, and proposals for
        `find_unused_parameters`, `static_graph` and the all-reduce. Proposals are not applied automatically: a branch
        may be taken later, or on one rank only. The result is the same on every rank; show it with
        `loop.print(loop.explain())`.
        """
        return self._prepared.explain(self._accumulate, self._things.name_of)

    def loader(self, dataset: Any, **options: Any) -> ShardedLoader | StreamLoader:
        """Return a loader of this rank's samples of `dataset`, map-style or iterable; not collective.

        `options`: `global_batch_size` (samples of all ranks) or `batch_size_per_rank`, `shuffle`, `drop_last`,
        `shares`, `weights`, `num_workers` and others; see the table in docs/data.md. Raises DataError for invalid and
        unknown options, and LoopError for a DataLoader.
        """
        if isinstance(dataset, DataLoader):
            raise LoopError(
                "making a loader",
                found="a DataLoader instead of a dataset",
                fix="Write loop.shard(loader), which divides it among the ranks.",
                rank=self.rank,
            )
        job = {"rank": self.rank, "world_size": self.world_size, "seed": self.seed}
        make: Any = make_stream_loader if isinstance(dataset, IterableDataset) else make_loader
        with naming_rank(self.rank):
            return make(dataset, **{**job, **options})  # type: ignore[no-any-return]

    def shard(self, loader: DataLoader[Any], **options: Any) -> ShardedLoader | StreamLoader:
        """Return this rank's loader for an existing DataLoader, with the batches of one process; not collective.

        Its `batch_size` counts the samples of all ranks, which is reported once; with `batch_size_per_rank=True`, those
        of each rank. `options`: also `shares`, `seed`, `divides_itself` and `seed_samples`; see docs/data.md.
        Raises DataError.
        """
        job = {"rank": self.rank, "world_size": self.world_size, "seed": self.seed, "say": self._say_once}
        with naming_rank(self.rank):
            return shard_loader(loader, **{**job, **options})
