# SPDX-License-Identifier: Apache-2.0
"""`Loop`: primitives for a custom training loop that gives the same results at any world_size."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ddpilot.data.loaders import prepare_data_loader
from ddpilot.data.options import naming_rank
from ddpilot.errors import LoopError
from ddpilot.group.init_group import init_group, seed_all
from ddpilot.group.protocol import GroupLike
from ddpilot.training.batch_groups import Loader
from ddpilot.training.combined import CombinedLoader
from ddpilot.training.engine.core import LoopCore
from ddpilot.training.engine.optimizer_steps import OptimizerSteps
from ddpilot.training.engine.parts import LoopParts
from ddpilot.training.engine.passes import Passes
from ddpilot.training.engine.preparation import Preparation
from ddpilot.training.evaluation.evaluate import evaluate, evaluate_step, predict, update_batch_norm
from ddpilot.training.logs.loggers import Logger
from ddpilot.training.loss_weights import add_losses
from ddpilot.training.models.comm_hooks import Comm
from ddpilot.training.models.ddp import DDPOptions
from ddpilot.training.models.sharding import ParameterSharding
from ddpilot.training.notices import locating, note_failures
from ddpilot.training.options import CheckpointOptions, check_numbers, naming_arguments
from ddpilot.training.step.accumulation import Accumulate, Accumulation
from ddpilot.training.step.precision import Kind
from ddpilot.training.step.weight_averages import Averaging, WeightAverage


@locating
class Loop(LoopCore):
    """Primitives for a custom training loop with the same results at any world_size. Creating one is collective.

    Training:

    - `seed`: seeds the weights created after this line, the same on every rank, and the order of the data. Dropout is
      seeded by `seed`, rank and epoch.
    - `accumulate`: number of batches per update. {0: 1, 5: 4}: 4 from epoch 5 on. {0: 1, "500 updates": 4}: 4 after 500
      updates. Or a function of (epoch, updates so far) that returns the same number on every rank.
    - `precision`: "fp32" (leaves dtypes unchanged), "tf32" (the same, with TensorFloat-32 on CUDA devices), "bf16" or
      "fp16" (mixed), "bf16-true" (weights and optimizer state in 16 bits, too).
    - `max_time_s`: seconds after which all ranks stop together, counted from the first `epochs` or `batches`; None: no
      limit.
    - `check_finite`: raise NonFiniteError on all ranks if a loss is NaN or infinite. With fp16, updates that overflow
      are skipped instead.

    Checkpoints:

    - `checkpoint_dir`: a directory for this run only; None: no checkpoints. A checkpoint is saved after each epoch, and
      when all ranks stop within one. `epochs` resumes from the latest checkpoint, at any number of ranks. An fsspec
      URL, such as "s3://bucket/run7", is possible: rank 0 uploads checkpoints in the background, and each node
      downloads the checkpoint to resume from.
    - `resume`: False starts over, and moves existing checkpoints to a subdirectory.
    - `keep`: number of newest checkpoints to keep; None: all.
    - `best`: "max acc" or "min loss": the best checkpoint by that metric of `save` is kept as well.
    - `save_every_s`, `save_every_updates`: also save within an epoch, at this interval in seconds or updates.
    - `save_every`: "500 updates" or "2 epochs" (an int counts updates): save at multiples of this number, at the end
      and when all ranks stop, instead of after each epoch.
    - `staging_dir`: with a URL, a local directory below which checkpoints are written before the upload; see
      `CheckpointDir`.

    Logs and progress:

    - `loggers`: one or several of `CsvLogger`, `JsonLinesLogger`, `TensorBoardLogger`, `WandbLogger` and
      `MLflowLogger`. They write what is passed to `log`.
    - `log_every`: number of updates per row. A row is written at the end of each pass, too.
    - `progress`: rank 0 shows the progress of each epoch in `batches`, on stderr. None: a bar in a terminal or a
      notebook, also for ranks launched from one; otherwise a line every 30 seconds. True: always the bar. False: no
      output.

    Process group:

    - `backend`, `timeout_s`: arguments of `init_group`, which creates or adopts the process group, also for a single
      rank.
    - `group`: use this group instead.

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
        self._trial_options = {**core, "check_finite": False, "progress": False, "group": self.group}
        note_failures(parts.count_updates)
        seed_all(seed)

    def __repr__(self) -> str:
        position, group = self._parts.position, self.group
        where = f"rank {group.rank} of {group.world_size} on {group.device}"
        return f"Loop({where}; epoch {position.epoch}, {position.num_updates} updates)"

    def trial(self) -> Loop:
        """Return a new loop to try something on copies of model and optimizer. Collective.

        The new loop has the same seed, `accumulate`, precision and group. It has no checkpoints, loggers or progress,
        and does not stop at losses that are not finite. The random states of this rank are seeded.
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
        `state_dict` and `load_state_dict`. One object is returned alone, several as a tuple. Weights, buffers
        and, unlike with DDP alone, the state and options of optimizers that have stepped are broadcast from rank 0.
        Methods of the original model can be called on the returned one; they run as forward passes of DDP. `explain`
        reports the chosen options and their reasons.

        - `comm`: how gradients are all-reduced. "bf16" or "fp16": in 16 bits. "powersgd" or a `PowerSGD`: as thin
          matrices, with error feedback. Or a communication hook of DDP, or (state, hook).
        - `sync_every`, `sync_start`: local SGD. After the first `sync_start` updates, gradients are not all-reduced.
          Weights are averaged over ranks every `sync_every` updates, at the end of a pass, and before they are read.
        - `shard`: "optimizer": each rank keeps the optimizer state of a share of the parameters only
          (ZeroRedundancyOptimizer); use the returned optimizer. "parameters", or a `ParameterSharding`: each rank keeps
          a shard of parameters, gradients and optimizer state (FSDP2 instead of DDP).
        - `find_unused_parameters`: True if updates may leave parameters unused. None: the variable
          DDP_FIND_UNUSED_PARAMETERS, else False.
        - `static_graph`: True if all updates of the training use the same parameters in the same way.
        - `bucket_cap_mb`: bucket size in MiB; None: DDP's 25.
        - `gradient_as_bucket_view`: True keeps no second copy of the gradients.
        - `forward_sync_buffers`: True broadcasts rank 0's buffers in forward passes, too. Every rank then has to run
          the same number of forward passes.
        - `sync_batch_norm`: True computes BatchNorm statistics over all ranks; on GPUs only.
        - `compile`: True, or arguments of torch.compile ("mode", "fullgraph", "dynamic", "backend", "options"). Models
          are compiled in place, before anything else, and the keys of their state_dict do not change. Only calls of a
          model are compiled, not its methods.
        - `more`: further arguments of DistributedDataParallel.

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
        """Return an average of the weights of the prepared `model`; the loop updates and saves it. Not collective.

        `how`: the decay of an exponential moving average (EMA), or an `Averaging`, for an equal average (SWA), a start,
        or an interval. Within `batches`, the average is updated after each update of the weights, or at the end of the
        first pass of each epoch. Outside of `batches`, call `update_parameters(model)` of the average.

        Evaluate the average like any model. If it is an equal average of a model with BatchNorm, call
        `update_batch_norm` first. With `shard="parameters"` the average is sharded like the model.

        Raises LoopError for a model that was not prepared, and if `copy.deepcopy` cannot copy a sharded model.
        """
        return self._preparation.average(model, how)

    def epochs(self, num: int | None = None, *, max_updates: int | None = None) -> Iterator[int]:
        """Yield the epoch numbers from `epoch` to `num` - 1, until all ranks decide to stop. Collective.

        `max_updates`: end after this many updates in total, also within an epoch of a long or endless stream; `num` may
        then be None. A later call with a larger number continues within that epoch.

        With a `checkpoint_dir`, training resumes from the latest checkpoint, also within an epoch, and a checkpoint is
        saved after each epoch. The last one is on disk when the iteration ends. SIGTERM and SIGUSR1 then save a
        checkpoint and raise SystemExit(75) on all ranks, so that a scheduler can requeue the job.

        Raises LoopError without `num` and `max_updates`. If `num` is None, raises it also for an epoch without samples
        or without `step`, because training would never end.
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

        A rank without samples in a batch gets zero rows and takes part in the forward pass; a prepared model that
        cannot run zero rows runs dummy rows. Outside of `epochs`, each further pass over the same data is a new epoch
        with a new order.

        Every rank iterates to the end, or to a stop of all ranks after the same update. Further passes of that epoch
        are then empty. SIGINT, SIGTERM and SIGUSR1 stop all ranks after the current update; a second SIGINT stops at
        once.

        Several loaders are read together: each batch is a tuple with one batch of each. Call `backward((loss_a,
        loss_b))`: each loss is weighted by the samples of its own loader.

        - `ends`: "shortest": the epoch ends with the shortest loader. "longest": it ends with the longest, and shorter
          ones are repeated, each time in a new order.
        - `weights`: one number per loader. Each batch comes from one loader, drawn with a probability in proportion to
          its weight, the same on every rank. `loop.batch.source` is the index of the loader. The epoch then ends when
          the first ("shortest") or last ("longest") loader is used up.

        Raises NonFiniteError on all ranks. Raises LoopError before the first batch if `loader` was not made by `loader`
        or `prepare_data_loader`, and if BatchNorm would get fewer than two samples.
        """
        if more or weights is not None or ends != "shortest":
            with naming_rank(self.rank):
                loader = CombinedLoader((loader, *more), ends=ends, weights=weights, seed=self.seed)
        return self._passes.batches(loader)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager for the forward and backward pass of one batch. Not collective itself.

        Gradients are all-reduced with the last batch of an accumulation group only. `models`: the prepared models whose
        gradients are computed inside.

        Raises LoopError, at any number of ranks, for models that were not prepared, and if the forward pass bypassed
        DDP, so that gradients were not all-reduced. Raises OutOfMemoryError if memory runs out inside, on this rank
        only: the other ranks end as after any error of one rank.
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

        Collective with the last batch of an accumulation group, and with a count or several named losses.

        - `loss`: a scalar, the mean over this rank's samples of the batch. A rank without samples contributes exact
          zeros, even if its loss is NaN.
        - `count`: number of items in the mean, if they are not samples (tokens, boxes). It costs a small collective.
        - `retain_graph`: as for `Tensor.backward`.

        For several losses with different items, pass a mapping, such as `{"box": (loss, num_boxes), "class": loss}`: it
        takes one backward pass and one small collective. Every rank passes the same names, and a count of 0 for an
        empty mean, which may be NaN. For `batches` of several loaders, pass a tuple with the mean over the samples of
        each; it costs no collective.

        Raises LoopError for invalid losses and counts, and for a mean cross entropy with class weights or ignored
        targets without its count.
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

        `norm_type`: above 0, or inf for the largest element. To clip the parameter groups of an optimizer separately,
        call it for the parameters of each. Returns None, without clipping, while gradients are being accumulated.

        Raises NonFiniteError, on all ranks alike, if the norm is not finite; with fp16, every optimizer that holds one
        of `parameters` skips its update instead. Raises LoopError for limits and norm types that are not above 0.
        """
        return self._steps.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clip each element of the gradients to [-`clip_value`, `clip_value`]. Not collective, unless sharded.

        Does nothing while gradients are being accumulated.

        Raises NonFiniteError, on all ranks alike, for a gradient that is not finite, which clipping would hide; with
        fp16 the update is skipped instead. Raises LoopError for a limit that is not above 0.
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

        Returns False, without an update, while gradients are being accumulated, and if fp16 skips the update; the same
        on all ranks.

        - `scheduler`: steps after an update. A ReduceLROnPlateau gets the update's mean loss over all ranks, and has to
          be prepared.
        - `closure`: for optimizers that compute the loss several times per update (LBFGS, SAM): a function that runs
          the forward pass and `loop.backward`. Gradients are cleared before each call. The optimizer gets the loss over
          all ranks, whatever the closure returns, so that all ranks take the same steps; this costs a small collective
          per call. Not supported with `accumulate` > 1 or fp16. A NonFiniteError leaves the weights at the optimizer's
          current trial point.
        - `ahead`: True runs the closure once before the optimizer steps, for optimizers that read gradients before they
          call it (SAM, as it is usually written). The optimizer's first call then returns that result, unless the
          weights were changed in between.

        Raises NonFiniteError on all ranks if a loss or gradient is not finite. On the CPU it is raised before anything
        is updated. On an accelerator the host does not wait: the optimizer gets zeros in place of such gradients, so
        that the weights remain finite. The error follows once the ranks have exchanged their flags, about 0.1 s and at
        most 32 updates later, and always before the end of the epoch, an evaluation and a save. After a `break` the
        next collective call of the loop other than `step` raises it. A backward pass after the error starts without
        gradients.

        Raises LoopError for parameters that belong to no prepared model. In `batches`, raises it also for gradients
        that no `loop.backward` computed, and if gradients remain from a backward pass before the last step of a
        different optimizer. With several ranks, raises it also for gradients of a forward pass that bypassed DDP. If
        that is intended, call `optimizer.step()`.
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

        Each sample counts once. The model runs unwrapped, in eval mode, with rank 0's buffers, and not at all on a rank
        without samples. Random states are restored. Pass either `metrics` or `step`.

        - `loader`: made by `loader` or `prepare_data_loader`, or a plain DataLoader, which is divided among the ranks
          here.
        - `metrics`: maps a name to a torchmetrics object, which is not changed, or to a function of (output, target).
          The function returns a value per sample, the batch's mean, or (mean, number of items in the mean). A
          torchmetrics MetricCollection is accepted, too. Without samples the value is NaN.
        - `forward(model, batch)`: returns the arguments of the metrics. Default: `(model(*batch[:-1]), batch[-1])`, or
          `(model(**batch), batch)` for a mapping.
        - `step(model, batch)`: computes the values itself, and returns them in a dict, in the forms that a function in
          `metrics` may return. A value without a dict is named "loss". It is not called on ranks without samples.

        Raises NonFiniteError on all ranks for an earlier update that has not been reported yet, and LoopError unless
        exactly one of `metrics` and `step` is given.
        """
        if (metrics is None) == (step is None) or (step is not None and forward is not None):
            is_none = metrics is None and step is None
            found = "neither `metrics` nor `step`" if is_none else "`step` next to `metrics` or `forward`"
            raise LoopError("evaluating", found=found, fix="Give `metrics`, with `forward` if needed; or `step` alone.")
        with self._reading():
            if step is not None:
                return evaluate_step(model, self._divided(loader), step, self.group)
            return evaluate(model, self._divided(loader), metrics, self.group, forward)

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

        Outputs are on the CPU: tensors with a row per sample, tuples and dicts of such tensors, or a list with an
        object per sample. Returns None on the other ranks, unless `on_all_ranks`, and if there are no samples.

        - `loader`: made by `loader` or `prepare_data_loader`, or a plain DataLoader, which is divided among the ranks
          here.
        - `to`: a directory into which rank 0 writes the outputs batch by batch, so that memory holds one batch only.
          Every rank returns its path; read it with `read_predictions`.
        - `forward(model, batch)`: returns the outputs of a batch. Default: `model(*batch[:-1])` for a tuple,
          `model(batch[0])` for one item, `model(**batch)` for a mapping, `model(batch)` for anything else.

        Raises NonFiniteError on all ranks for an earlier update that has not been reported yet.
        """
        with self._reading():
            divided = self._divided(loader)
            return predict(model, divided, self.group, to=to, on_all_ranks=on_all_ranks, forward=forward)

    def update_batch_norm(
        self,
        model: nn.Module,
        loader: Loader | DataLoader[Any],
        *,
        max_batches: int | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
    ) -> None:
        """Compute the statistics of the BatchNorm layers of `model` over the batches of `loader`. Collective.

        Use it for averaged weights: BatchNorm statistics of training belong to other weights. It works as torch's
        `update_bn`, with the batches of all ranks, so that statistics are the same at any number of ranks. The model
        runs in train mode without gradients. Random states are restored.

        - `max_batches`: maximum number of batches; None: all.
        - `forward`: as for `predict`.

        Raises LoopError for a batch with a single value per channel.
        """
        self._parts.join()
        self._parts.settle_averages()
        options: dict[str, Any] = {"epoch": self.epoch, "max_batches": max_batches, "forward": forward}
        with self.autocast():
            update_batch_norm(model, self._divided(loader), self.group, **options)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Complete what is pending, and run the block in the loop's precision, outside of training's time."""
        self._parts.join()
        self._parts.before_read()
        self._parts.checkpointer.report_resumed()
        self._parts.settle_averages()
        with self.autocast(), self._parts.clock.paused():
            yield

    def _divided(self, loader: Loader | DataLoader[Any]) -> Loader:
        if not isinstance(loader, DataLoader):
            return loader
        # The batch size does not affect results here, so its meaning is not reported; ranks may also get no samples.
        rank, world_size = self.rank, self.world_size
        return prepare_data_loader(loader, rank=rank, world_size=world_size, seed=self.seed, empty_ranks=True)
