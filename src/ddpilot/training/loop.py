# SPDX-License-Identifier: Apache-2.0
"""`Loop`: primitives for a custom training loop that gives the same results at any world_size."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ddpilot.data.options import naming_rank
from ddpilot.group.init_group import init_group, seed_all
from ddpilot.group.protocol import GroupLike
from ddpilot.training.batches import Loader
from ddpilot.training.combined import CombinedLoader
from ddpilot.training.engine.core import LoopCore
from ddpilot.training.engine.inference import Inference
from ddpilot.training.engine.optimizer_steps import OptimizerSteps
from ddpilot.training.engine.parts import LoopParts
from ddpilot.training.engine.passes import Passes
from ddpilot.training.engine.preparation import Preparation
from ddpilot.training.logs.logger import Logger
from ddpilot.training.loss_weights import add_losses
from ddpilot.training.models.comm_hooks import Comm
from ddpilot.training.models.ddp_options import DDPOptions
from ddpilot.training.models.sharding import (
    ParameterSharding,
)
from ddpilot.training.notices import locating
from ddpilot.training.options import CheckpointOptions, check_numbers, naming_arguments
from ddpilot.training.resume.failure_note import note_failures
from ddpilot.training.step.accumulation import Accumulation
from ddpilot.training.step.accumulation_schedule import Accumulate
from ddpilot.training.step.averaging import Averaging, WeightAverage
from ddpilot.training.step.precision import Kind


@locating
class Loop(LoopCore):
    """Primitives for a custom training loop with the same results at any world_size. Creating one is collective.

    `seed`: seeds weights created after this line (the same on every rank), the order of the data, and, together with
    the rank, dropout in each epoch. `accumulate`: number of batches per update; {0: 1, 5: 4}: 4 from epoch 5 on;
    {0: 1, "500 updates": 4}: 4 after 500 updates; or a function of (epoch, updates so far), the same on every rank.
    `precision`: "fp32" (leaves dtypes unchanged), "tf32" (the same, with TensorFloat-32 on CUDA devices), "bf16" or
    "fp16" (mixed), "bf16-true" (weights and optimizer state in 16 bits, too). `max_time_s`: seconds after which all
    ranks stop together, counted from the first `epochs` or `batches`; None: no limit.
    `check_finite`: raise NonFiniteError on all ranks if a loss is NaN or infinite (with fp16, updates that overflow are
    skipped instead). `backend`, `timeout_s`: arguments of `init_group`, which initialises or adopts the process group,
    also for a single rank. `group`: use this group instead.

    `checkpoint_dir`: a directory for this run only, in which a checkpoint is saved after each epoch and when all ranks
    stop within one; None: no checkpoints. `epochs` resumes from the latest checkpoint there, at any number of ranks;
    `resume=False` starts over and moves existing checkpoints to a different directory. `keep`: number of newest
    checkpoints to keep, None for all. `best`: "max acc" or "min loss"; the best checkpoint by that metric of `save` is
    kept as well. `save_every_s`, `save_every_updates`: also save within an epoch, after this many seconds or updates.
    `save_every`: "500 updates" or "2 epochs" (an int counts updates): save whenever the training has made a multiple of
    that, at the end and when all ranks stop, and not after each epoch. `checkpoint_dir` may be an fsspec URL, such as
    "s3://bucket/run7": rank 0 writes checkpoints to a local directory below `staging_dir` (see `CheckpointDir`) and
    uploads them in the background; each node downloads the one to resume from.

    `loggers`: one or several of `CsvLogger`, `JsonLinesLogger`, `TensorBoardLogger`, `WandbLogger` and `MLflowLogger`,
    which get what `log` is called with, in rows of `log_every` updates (default 50) and at the end of each pass.

    `progress`: rank 0 shows the progress of each epoch in `batches`, on stderr. None: a bar in a terminal or a
    notebook, also for ranks launched from one, and in logs a line every 30 seconds. True: always the bar. False: no
    output.

    Raises the errors of `init_group`, LoopError for invalid arguments, and CheckpointError on all ranks if the
    directory is not writable.
    """

    @naming_arguments("making a Loop")
    def __init__(
        self,
        seed: int = 0,
        *,
        accumulate: Accumulate = 1,
        precision: Kind = "fp32",
        max_time_s: float | None = None,
        check_finite: bool = True,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        keep: int | None = 3,
        best: str | None = None,
        save_every_s: float | None = None,
        save_every_updates: int | None = None,
        save_every: int | str | None = None,
        resume: bool = True,
        staging_dir: str | os.PathLike[str] | None = None,
        loggers: Logger | Sequence[Logger] = (),
        log_every: int = 50,
        progress: bool | None = None,
        backend: str | None = None,
        timeout_s: float | None = None,
        group: GroupLike | None = None,
    ) -> None:
        check_numbers(seed=seed, max_time_s=max_time_s)
        self.group: GroupLike = init_group(backend, timeout_s) if group is None else group
        core: dict[str, Any] = {"seed": seed, "accumulate": accumulate, "precision": precision}
        parts = LoopParts(self.group, **core, max_time_s=max_time_s, check_finite=check_finite, progress=progress)
        saving: dict[str, Any] = {"keep": keep, "best": best, "resume": resume, "staging_dir": staging_dir}
        saving |= {"save_every_s": save_every_s, "save_every_updates": save_every_updates, "save_every": save_every}
        parts.add_checkpoints(CheckpointOptions(checkpoint_dir=checkpoint_dir, **saving))
        parts.add_logs(loggers, log_every)
        super().__init__(parts)
        self._preparation = Preparation(parts)
        self._passes = Passes(parts)
        self._steps = OptimizerSteps(parts)
        self._inference = Inference(parts)
        self._trial_options = {**core, "check_finite": False, "progress": False, "group": self.group}
        note_failures(parts.count_updates)
        seed_all(seed)

    def __repr__(self) -> str:
        position, group = self._parts.position, self.group
        where = f"rank {group.rank} of {group.world_size} on {group.device}"
        return f"Loop({where}; epoch {position.epoch}, {position.num_updates} updates)"

    def trial(self) -> Loop:
        """Return a new loop with the same seed, `accumulate`, precision and group, to try something on copies.

        It has no checkpoints, loggers or progress, and does not stop at losses that are not finite. Seeds the random
        states of this rank. Collective.
        """
        return Loop(**self._trial_options)

    def prepare(
        self,
        *things: Any,
        comm: Comm | None = None,
        sync_every: int | None = None,
        sync_start: int = 0,
        shard: Literal["optimizer", "parameters"] | ParameterSharding | None = None,
        find_unused_parameters: bool | None = None,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        forward_sync_buffers: bool = False,
        sync_batch_norm: bool = False,
        compile: bool | Mapping[str, Any] = False,  # noqa: A002  (torch's word)
        **more: Any,
    ) -> Any:
        """Move models to the device and, with several ranks, wrap them in DDP; return all objects in order. Collective.

        `things`: models, optimizers, and objects to save with them: schedulers, an `AveragedModel`, anything with
        `state_dict` and `load_state_dict`; one object is returned alone, several as a tuple. Weights, buffers and,
        unlike with DDP alone, the state and options of optimizers that have stepped are broadcast from rank 0. A
        returned model has the methods of the original, which run as forward passes of DDP. `explain` reports the chosen
        options and their reasons.

        `comm`: "bf16" or "fp16": all-reduce gradients in 16 bits; "powersgd" or a `PowerSGD`: as thin matrices, with
        error feedback; or a communication hook of DDP, or (state, hook). `sync_every`: local SGD: do not all-reduce
        gradients after the first `sync_start` updates, and average the weights every so many updates, at the end of a
        pass and before they are read. `shard="optimizer"`: each rank keeps the optimizer state of its share of the
        parameters only (ZeroRedundancyOptimizer); use the returned optimizer. `shard="parameters"`, or a
        `ParameterSharding`: a shard of parameters, gradients and state (FSDP2 instead of DDP).
        `find_unused_parameters`: updates may leave parameters unused; None: the variable DDP_FIND_UNUSED_PARAMETERS,
        False if it is not set. `static_graph`: all updates of the training use the same parameters in the same way.
        `bucket_cap_mb`: bucket size in MiB; None: DDP's 25. `gradient_as_bucket_view`: no second copy of gradients.
        `forward_sync_buffers`: rank 0's buffers are broadcast in forward passes too, of which every rank then has to
        run equally many. `sync_batch_norm`: BatchNorm statistics over all ranks, on GPUs only. `compile`: True, or
        arguments of torch.compile ("mode", "fullgraph", "dynamic", "backend", "options"): compile models in place,
        before anything else; the keys of their state_dict remain. Only calls of a model are compiled, not its methods.
        `more`: further arguments of DistributedDataParallel.

        Raises LoopError for objects of other types, for a DDP model, for options that DDP does not have or that a model
        or an optimizer does not support, and for `sync_batch_norm` on the CPU.
        """
        options = DDPOptions(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            forward_sync_buffers=forward_sync_buffers,
            comm=comm,
            sync_every=sync_every,
            sync_start=sync_start,
            shard=shard,
            sync_batch_norm=sync_batch_norm,
            compile=compile,
            more=more,
        )
        returned = self._preparation.prepare(things, options)
        return returned[0] if len(returned) == 1 else returned

    def average(self, model: nn.Module, how: Averaging | float) -> WeightAverage:
        """Return an average of the weights of the prepared `model` that the loop updates and saves. Not collective.

        `how`: the decay of an exponential moving average (EMA), or an `Averaging`, for an equal one (SWA), a start, and
        an interval. Within `batches` it is updated after the steps of each batch or accumulation group that changed the
        weights, or at the end of the first pass of each epoch; outside call its `update_parameters(model)`. Evaluate it
        as any model, and call `update_batch_norm` first if it is an equal average of a model with BatchNorm. Raises
        LoopError for a model that was not prepared. With `shard="parameters"` the average is sharded as the model is,
        and LoopError is raised if `copy.deepcopy` cannot copy the model.
        """
        return self._preparation.average(model, how)

    def epochs(self, num: int | None = None, *, max_updates: int | None = None) -> Iterator[int]:
        """Yield the epoch numbers from `epoch` to `num` - 1, until all ranks decide to stop. Collective.

        `max_updates`: end after this many updates in total, also within an epoch, in the middle of a long or endless
        stream; `num` may then be None. A later call, with a larger number, continues within that epoch.

        With a `checkpoint_dir` it resumes from the latest checkpoint, also within an epoch, and saves one after each
        epoch; when it ends, the last one is on disk. SIGTERM and SIGUSR1 then save a checkpoint and raise
        SystemExit(75) on all ranks, so that a scheduler can requeue the job. Raises LoopError without `num` and
        `max_updates`, and, if `num` is None, for an epoch without samples, after which training would never end.
        """
        return self._passes.epochs(num, max_updates)

    def batches(
        self,
        loader: Loader,
        *more: Loader,
        ends: Literal["shortest", "longest"] = "shortest",
        weights: Sequence[float] | None = None,
    ) -> Iterator[Any]:
        """Yield this rank's part of every batch of the epoch, on the device. Collective.

        Several loaders are read in step: each batch is a tuple with one of each. `ends`: the epoch ends with the
        "shortest" loader, or with the "longest", and shorter ones are repeated, each time in a new order. Call
        `backward((loss_a, loss_b))`: each loss is weighted by the samples of its own loader. `weights`: each batch is
        from one loader instead, drawn with a probability in proportion to its weight, the same on every rank;
        `loop.batch.source` is its index. `ends` then applies to the first or the last loader that is used up.

        A rank without samples in a batch gets zero rows and takes part in the forward pass; a prepared model runs dummy
        rows if it cannot run zero rows. Outside of `epochs`, each further pass over the same data is a new epoch with a
        new order. Every rank iterates to the end or to the joint stop, which is after an update, the same on all ranks;
        further passes of that epoch are empty. SIGINT, SIGTERM and SIGUSR1 stop all ranks after the current update; a
        second SIGINT stops at once. Raises NonFiniteError on all ranks, and LoopError before the first batch if
        `loader` was not made by `loader` or `prepare_data_loader`, and if BatchNorm would get a part of fewer than two
        samples.
        """
        if more or weights is not None or ends != "shortest":
            with naming_rank(self.rank):
                loader = CombinedLoader((loader, *more), ends=ends, weights=weights, seed=self.seed)
        return self._passes.batches(loader)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Context manager for the forward and backward pass of one batch.

        Gradients are all-reduced only with the last batch of an accumulation group. Pass the prepared models for which
        the backward pass inside computes gradients. Raises LoopError for models that were not prepared, at any number
        of ranks, and if the forward pass bypassed DDP, so that gradients were not all-reduced. Raises OutOfMemoryError
        if memory runs out inside, on this rank only: the other ranks end as after any error of one rank.
        """
        self._parts.unprepared.check_models(models)
        return Accumulation(models, self._updates, self._precision, self.group, self._parts.sharing)

    def backward(
        self,
        loss: torch.Tensor
        | Sequence[torch.Tensor]
        | Mapping[str, torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]],
        count: float | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Run the backward pass of this rank's mean `loss`, weighted so that the update uses the mean over all samples.

        `loss`: a scalar, the mean over this rank's samples of the batch; a rank without samples contributes exact
        zeros, even if its loss is NaN. `count`: number of items that the mean is over, if they are not samples (tokens,
        boxes); it costs a small collective. For several losses that are means over different items, pass a mapping,
        such as `{"box": (loss, num_boxes), "class": loss}`: one backward pass and one small collective; every rank
        passes the same names, with a count of 0 for an empty mean (which may be NaN). For `batches` of several loaders
        in step, pass a tuple with a mean over the samples of each; it costs no collective. Collective with the last
        batch of an accumulation group, and with a count or several named losses. Raises LoopError for invalid losses
        and counts, and for a mean cross entropy with class weights or ignored targets without its count.
        """
        scaler = self._precision.scaler
        if scaler is not None:
            self._precision.settle_overflow(self._parts.prepared.optimizers)
        self._updates.backward(loss, count, scaler, retain_graph)
        if self.progress.is_shown:
            self.progress.note_loss(add_losses(loss))

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip the gradient norm to `max_norm` and return the norm before clipping. Not collective, unless sharded.

        `norm_type`: above 0, or inf for the largest element. Call it for the parameters of each group of an optimizer
        to clip them separately. Returns None, without clipping, while gradients are being accumulated. Raises
        NonFiniteError, on all ranks alike, if the norm is not finite; fp16 skips the update of every optimizer that
        holds one of `parameters`. Raises LoopError for limits and norm types that are not above 0.
        """
        return self._steps.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clip each element of the gradients to at most `clip_value` in size. Not collective, unless sharded.

        Does nothing while gradients are being accumulated. Raises NonFiniteError, on all ranks alike, for a gradient
        that is not finite, which clipping would hide; with fp16 its update is skipped. Raises LoopError for a limit
        that is not above 0.
        """
        self._steps.clip_value(parameters, clip_value)

    def step(
        self,
        optimizer: Optimizer,
        scheduler: Any = None,
        *,
        closure: Callable[[], object] | None = None,
        ahead: bool = False,
    ) -> bool:
        """Step the optimizer, clear its gradients and step `scheduler`. True if the weights were updated. Collective.

        Returns False, without an update, while gradients are being accumulated; also if fp16 skips the update, on all
        ranks alike. Raises NonFiniteError on all ranks, on the CPU before anything is updated. On an accelerator the
        host does not wait: the optimizer gets zeros in place of gradients that are not finite, so the weights remain
        finite, and the error is raised once the ranks have exchanged their flags, about 0.1 s later (at most 32
        updates, and always before the end of the epoch, an evaluation and a save; after a `break` by the next
        collective call of the loop other than `step`). A backward pass after the error starts without gradients. Raises
        LoopError, at any number of ranks, for parameters that belong to no prepared model, and in `batches` for
        gradients without any `loop.backward`, and for gradients of a backward pass before the last step of a different
        optimizer, which that step did not clear, added to later ones; with several ranks also for gradients of a
        forward pass that bypassed DDP. If that is intended, call `optimizer.step()`.

        `scheduler`: a ReduceLROnPlateau gets the update's mean loss over all ranks; it has to be prepared. `closure`:
        for optimizers that compute the loss several times per update (LBFGS, SAM): a function that runs forward and
        `loop.backward`. Gradients are cleared before each call, and the optimizer gets the loss over all ranks,
        whatever the closure returns, so all ranks take the same steps; this costs a small collective per call. Not
        supported with `accumulate` > 1 or fp16. A NonFiniteError leaves the weights at the optimizer's current trial
        point. `ahead`: call it once before the optimizer steps, for those that read gradients before they call their
        closure (SAM, as it is usually written); the optimizer's first call is then not a second evaluation, unless the
        weights were changed before it.
        """
        return self._steps.step(optimizer, scheduler, closure, ahead)

    def evaluate(
        self,
        model: nn.Module,
        loader: Loader | DataLoader[Any],
        metrics: Mapping[str, Any] | None = None,
        *,
        forward: Callable[[nn.Module, Any], tuple[Any, ...]] | None = None,
        step: Callable[[nn.Module, Any], Any] | None = None,
    ) -> dict[str, Any]:
        """Return the value of each metric over all samples of `loader`, the same on every rank. Collective.

        Each sample counts once. `loader`: a loader made by `loader` or `prepare_data_loader`, or a plain DataLoader,
        which is divided here. `metrics`: maps a name to a torchmetrics object (which is not changed) or to a function
        of (output, target) that returns a value per sample, the batch's mean, or (mean, count of items in the mean); or
        a torchmetrics MetricCollection. The value is NaN without samples. The model runs unwrapped, in eval mode, with
        rank 0's buffers, and not at all on a rank without samples. `forward(model, batch)` returns the arguments of the
        metrics; default: `(model(*batch[:-1]), batch[-1])`, or `(model(**batch), batch)` for a mapping. Random
        states are restored.

        `step(model, batch)`, in place of metrics, computes everything itself and returns a dict of values, each as a
        function in `metrics` returns it; a value alone is named "loss". It is not called on ranks without samples.

        Raises NonFiniteError on all ranks for an earlier update that has not been reported yet, and LoopError unless
        one of `metrics` and `step` is given.
        """
        return self._inference.evaluate(model, loader, metrics, forward, step)

    def predict(
        self,
        model: nn.Module,
        loader: Loader | DataLoader[Any],
        *,
        to: str | os.PathLike[str] | None = None,
        on_all_ranks: bool = False,
        forward: Callable[[nn.Module, Any], Any] | None = None,
    ) -> Any:
        """Return the model's outputs for all samples of `loader`, in dataset order, on rank 0. Collective.

        `loader`: a loader made by `loader` or `prepare_data_loader`, or a plain DataLoader, which is divided here.
        Outputs: tensors with a row per sample, tuples and dicts of them, or a list with an object per sample; on the
        CPU. None on the other ranks, unless `on_all_ranks`, and if there are no samples. `to`: a directory that rank 0
        writes batch by batch, so that memory holds only one batch; read it with `read_predictions`; its path is
        returned on every rank. `forward(model, batch)`: default `model(*batch[:-1])` for a tuple, `model(batch[0])` for
        one item, `model(**batch)` for a mapping, `model(batch)` for anything else. Raises NonFiniteError on all ranks
        for an earlier update that has not been reported yet.
        """
        return self._inference.predict(model, loader, to, on_all_ranks, forward)

    def update_batch_norm(
        self,
        model: nn.Module,
        loader: Loader | DataLoader[Any],
        *,
        max_batches: int | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
    ) -> None:
        """Compute the statistics of the BatchNorm layers of `model` over the batches of `loader`. Collective.

        For averaged weights, whose statistics are not those of any model that was trained; as torch's `update_bn`, with
        the batches of all ranks: the same statistics at any number of ranks. The model runs in train mode without
        gradients. `max_batches`: at most these many. `forward`: as for `predict`. Random states are restored.
        Raises LoopError for a batch with a single value per channel.
        """
        self._inference.update_batch_norm(model, loader, max_batches, forward)
