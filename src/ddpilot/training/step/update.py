# SPDX-License-Identifier: Apache-2.0
"""Backward passes of an update: weights losses, all-reduces gradients exactly once, and checks them before the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from ddpilot.checkpoint.weights import class_name
from ddpilot.errors import LoopError
from ddpilot.group.protocol import GroupLike
from ddpilot.training.batch_groups import CurrentBatch
from ddpilot.training.checks.ddp_bypass import ForwardBypassCheck
from ddpilot.training.checks.gradients import (
    ClearedGradientCheck,
    LeftoverGradientCheck,
    RepeatedBackwardCheck,
    SharedParameterCheck,
)
from ddpilot.training.checks.loss_means import LossMeanCheck
from ddpilot.training.checks.nonfinite import FiniteCheck, raise_nonfinite
from ddpilot.training.coordination.stop import Decision, FlagExchange
from ddpilot.training.loss_weights import (
    LossWeights,
    NamedLoss,
    Objective,
    backward_weighted,
    check_losses,
    has_gather,
    read_losses,
    silencing,
)
from ddpilot.training.models.comm_hooks import carries_errors, forget_errors
from ddpilot.training.models.optimizers import clear_gradients, requires_closure
from ddpilot.training.models.registry import (
    OptimizerRecord,
    PreparedModel,
    PreparedObjects,
    ReducerErrors,
    has_gradients,
)
from ddpilot.training.step.empty_batch import EmptyBatchForward, share_buffers


class UpdateState:
    """The current batch, and the gradients of the `prepared` models up to the next update."""

    def __init__(
        self, prepared: PreparedObjects, group: GroupLike, flags: FlagExchange, finite: FiniteCheck | None
    ) -> None:
        self._prepared = prepared
        self._group = group
        self._device_type = group.device.type
        self._flags = flags
        self._finite = finite
        self._weights = LossWeights(group.world_size, self._sum_over_ranks)
        self._is_due = self._is_spoilt = self._is_left = False
        self.has_backward = False
        """True if a backward pass of the accumulation group has run."""
        self._graphs = RepeatedBackwardCheck()
        self._means = LossMeanCheck(group.device)
        self._empty_forward = EmptyBatchForward()
        self._had_samples: tuple[bool, bool] | None = None  # any, and of each loader, where some rank has none
        self._loss: weakref.ref[torch.Tensor] | None = None
        self._last_count = 0
        self._stepped: set[Optimizer] = set()  # in the current update
        self._with_gradients: set[Optimizer] = set()  # of `backward`, in the current accumulation group
        self.objective: Objective | None = None
        """The loss of the current update over its backward passes; None unless it is needed."""
        self._is_reduced = False  # the last backward pass is known to have used all parameters
        self._checked: set[int] = set()  # parameters whose gradients were checked since the last backward pass
        self._groups = ClearedGradientCheck(prepared)
        self._leftovers = LeftoverGradientCheck(prepared)
        self._shared = SharedParameterCheck(prepared)
        self.reducers = ReducerErrors(prepared)
        """Detects parameters whose gradients DDP waits for and did not get."""
        self.bypasses = ForwardBypassCheck(prepared)
        """Detects DDP models that an update bypasses."""
        self.has_local = False
        """True if the gradients of the ranks differ, so that they have to be told of those that are not finite."""
        self.accumulating: tuple[nn.Module, ...] = ()
        """The models of the current `Loop.accumulate`."""
        self.batch: CurrentBatch | None = None
        """The current batch; None outside `batches`."""
        self.is_update = True
        """True if the gradients are complete after this batch; also True outside `batches`."""
        self.num_steps = 0
        """Number of steps of all optimizers, including those that fp16 skipped."""

    def add_model(self, prepared: PreparedModel) -> None:
        """Record the local gradients of `prepared`, which was just added, before they are all-reduced."""
        if self._finite is not None and prepared.ddp is not None:
            self._finite.probes.watch(prepared.module, prepared.reduced.values())

    def let_ranks_differ(self) -> None:
        """From now on, the gradients of the ranks are not the same: exchange before raising for them."""
        self.has_local = True
        if self._finite is not None:
            self._finite.differ()

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Check the steps of `optimizer`, which was just prepared, and whether it shares parameters with others."""
        self._shared.add(optimizer)
        if self._group.world_size == 1:  # the gradients are those of a single process
            return
        this = weakref.ref(self)

        def check(stepping: Optimizer, _args: object, _kwargs: object) -> None:
            state = this()
            if state is not None:
                state.check_plain_step(stepping)

        with suppress(AttributeError):  # a wrapper of an optimizer that does not call Optimizer.__init__ has no hooks
            optimizer.register_step_pre_hook(check)
            optimizer.register_step_post_hook(check)  # a closure computes the gradients within the step

    def enter(self, batch: CurrentBatch) -> None:
        """Set the current batch."""
        self.leave()
        self.batch, self.is_update = batch, batch.is_last
        if batch.has_empty_rank:
            self._had_samples = (batch.count > 0, not batch.lacks_samples)
        if not batch.count or (batch.has_empty_rank and batch.lacks_samples):
            self._empty_forward.begin([prepared.module for prepared in self._prepared.models])
        self._is_due = batch.is_last and self._flags.next_update()
        self._is_reduced = False
        self._forget_checks()
        if batch.is_last:
            self.bypasses.begin()
        if batch.is_first:
            self._stepped.clear()
            self._with_gradients.clear()
            self._weights.begin_group()
            self._groups.begin()
            self._leftovers.begin_group()
            if self.objective is not None:
                self.objective.begin()
            self.has_backward = False

    def share_buffers(self) -> None:
        """After a batch in which some rank had no samples, use the buffers of one that had. Collective then."""
        had_samples, self._had_samples = self._had_samples, None
        if had_samples is not None:
            some, each = had_samples
            share_buffers((one.module for one in self._prepared.models), self._group, had_samples=some, had_each=each)

    def count_behind(self, value: object) -> float:
        """Return the number of samples behind `value` on this rank, also for the batch's loss afterwards; else 1."""
        if self.batch is not None:
            if self.batch.parts:
                raise LoopError(
                    "reducing a mean",
                    found=f"no `count` in a batch of {len(self.batch.parts)} loaders",
                    fix="Pass the samples that the mean is over: loop.reduce(loss, count=len(x)).",
                )
            return float(self.batch.count)
        return float(self._last_count) if self._loss is not None and self._loss() is value else 1.0

    def leave(self) -> None:
        """Reset the current batch."""
        if self.batch is not None:
            self._last_count = self.batch.count
        self.batch, self.is_update = None, True
        if self._graphs.has_graph:
            self._graphs.begin()
        self._empty_forward.end()

    def backward(self, loss: Any, count: float | None, scaler: torch.amp.GradScaler | None, retain_graph: bool) -> None:
        """Implement `Loop.backward`. Collective if gradients are all-reduced, with a count and for several losses."""
        self._begin_backward()
        losses = read_losses(loss, count)
        check_losses(losses)
        is_single = losses[0].name is None
        if count is not None and not is_single:
            raise LoopError(
                "running backward",
                found="`count` with several losses",
                fix='Pass a count for each: {"box": (loss, count)}.',
            )
        for one in losses:
            self._means.check_sum(one.value, self.batch, one.name or "", one.part)
            if one.count is None:
                self._means.check(one.value, self.batch, one.name or "", one.part)
        self._is_reduced = False
        self._loss = weakref.ref(loss) if is_single else None
        self.has_backward = True
        without: list[Optimizer] = []
        if len(self._prepared.optimizers) > 1:
            without = [one for one in self._prepared.optimizers if one not in self._with_gradients]
            self._with_gradients.update(without)  # hooks may step within the backward pass
        counts, correction = self._weights.count(losses, self.batch, self.accumulating)
        # A hook that adds what earlier updates have lost needs gradients in their final unit.
        is_before = correction != 1.0 and carries_errors(self.accumulating)
        if is_before:
            self._scale_gradients(correction)
            self._backward(losses, [(num, total / correction) for num, total in counts], scaler, retain_graph)
        else:
            self._backward(losses, counts, scaler, retain_graph)
        if correction != 1.0 and not is_before:
            self._scale_gradients(correction)
        if without:
            self._with_gradients.difference_update(one for one in without if not has_gradients(one))
        if self.objective is not None:
            for one, (num, total) in zip(losses, counts, strict=True):
                self.objective.add(one.value, num / total if total else 0.0, correction)

    def _scale_gradients(self, factor: float) -> None:
        gradients = [p.grad for model in self.accumulating for p in model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, factor)

    def _backward(
        self,
        losses: Sequence[NamedLoss],
        counts: Sequence[tuple[float, float]],
        scaler: torch.amp.GradScaler | None,
        retain_graph: bool,
    ) -> None:
        # fp16 losses leave out DDP's factor world_size, so they overflow where a single process does: see `Precision`.
        factor = self._group.world_size if scaler is None else 1
        roots, seeds, idle = [], [], []
        for one, (num, total) in zip(losses, counts, strict=True):
            weight = num * factor / total if num and total else 0.0
            if not weight:
                idle.append(one.value)
                continue
            roots.append(one.value)
            check = self._finite
            seeds.append(weight if check is None else check.seed(one.value, weight, self.batch, one.name or ""))
        if self._is_due and not self._flags.is_under_way:
            self._begin()  # overlaps with the all-reduce of gradients
        if not idle:
            self._run(roots, seeds, scaler, retain_graph)
        elif not roots:
            self._run(idle, None, scaler, retain_graph)
        else:
            with silencing(idle, roots):
                self._run([*roots, *idle], [*seeds, *[0.0] * len(idle)], scaler, retain_graph)

    def _run(
        self,
        losses: Sequence[torch.Tensor],
        seeds: Sequence[torch.Tensor | float] | None,
        scaler: torch.amp.GradScaler | None,
        retain_graph: bool,
    ) -> None:
        """Run one backward pass of all `losses`.

        Without `seeds`, it adds only other ranks' gradients to gathered rows.
        """
        if torch.is_autocast_enabled(self._device_type):
            with torch.autocast(self._device_type, enabled=False):
                self._run(losses, seeds, scaler, retain_graph)
            return
        if seeds is None and self._finite is not None:
            self._finite.probes.pause()
        if seeds is None and (self._prepared.has_sharded or has_gather(losses)):
            with silencing(losses, ()):
                self._run(losses, [0.0] * len(losses), scaler, retain_graph)
            return
        accumulates = self.batch is not None and self.batch.group_size > 1
        if accumulates:
            self._groups.check(self.batch)
        if (retain_graph or self._graphs.has_graph) and self.is_update:
            self._graphs.check(losses, self._prepared, retains=retain_graph)
        if self.batch is not None and self.is_update and self.bypasses.checks_graphs:
            self.bypasses.check_graph(losses)
        if scaler is not None:
            losses = [scaler.scale(loss) for loss in losses]
        if self._shared.has_shared:
            self._shared.begin_pass()
        hooks = self._leftovers.begin_pass()
        try:
            backward_weighted(losses, seeds, self._prepared, retain_graph=retain_graph)
        except RuntimeError as error:
            self.reducers.explain(error)
            raise
        finally:
            for hook in hooks:
                hook.remove()
        if self.is_update and self._prepared.ddp_models:
            self.reducers.order_buckets()
        if accumulates:
            self._groups.note(self.accumulating or self._prepared)

    def after_step(self, optimizer: Optimizer, own: OptimizerRecord) -> None:
        """Mark the accumulated gradients of `optimizer`, with the record `own`, as applied and cleared."""
        self.num_steps += 1
        self._groups.note_step(optimizer)
        if self._shared.has_shared:
            self._shared.note_step(optimizer)
        self._leftovers.note_step(own, in_group=self.batch is not None and self.batch.group_size > 1)
        if self.objective is not None:
            self.objective.end()

    def begins_update(self, optimizer: Optimizer) -> bool:
        """True if the step that `optimizer` has just made is the first one of an update.

        An update is at most one step of each optimizer: one that steps a second time begins the next update.
        """
        begins = not self._stepped or optimizer in self._stepped
        if begins:
            self._stepped.clear()
        self._stepped.add(optimizer)
        return begins

    def keep_objective(self) -> Objective:
        """Start to record the loss of each update for `objective`."""
        if self.objective is None:
            self.objective = Objective(self._group)
        return self.objective

    def evaluate(self, closure: Callable[[], object], optimizer: Optimizer) -> torch.Tensor:
        """Run `closure`, which computes gradients for `optimizer`, and return the loss over all ranks. Collective.

        Raises LoopError if it does not call `backward`, and NonFiniteError on all ranks alike.
        """
        objective = self.keep_objective()
        objective.begin()
        clear_gradients(optimizer)
        with torch.enable_grad():
            closure()
        if not objective.is_known:
            raise LoopError(
                "updating the weights with a closure",
                found="the closure did not call loop.backward()",
                fix="Write loop.backward(loss) in the closure instead of loss.backward().",
            )
        self.check_step(optimizer, self._prepared.record_of(optimizer), has_closure=True)
        self.check_pending()  # an optimizer that tries steps must not get a loss that is not finite
        return objective.reduce()

    def check_step(self, optimizer: Optimizer, own: OptimizerRecord, *, has_closure: bool = False) -> None:
        """Check the gradients that `optimizer`, with the record `own`, is about to apply, after `complete`.

        `has_closure`: the optimizer clears them and computes them again.

        Raises the errors of `complete`, and LoopError if the gradients are not from `backward`, not all-reduced or not
        of this update.
        """
        self._check_backward(optimizer, own)
        if not has_closure:
            self._leftovers.check(optimizer, own)
            if self._shared.has_shared:
                self._shared.check(optimizer)
        self.complete()
        is_checked = self._checked and self._checked.issuperset(map(id, own.reduced))
        if self._finite is not None and own.reduced and not is_checked:
            self._check_finite(own.reduced)

    def check_plain_step(self, optimizer: Optimizer) -> None:
        """Raise LoopError if `optimizer` steps by gradients of `loss.backward()`, which were averaged over ranks.

        Of ranks with different numbers of samples, their mean is not that over the samples.
        """
        if self.batch is None or self._is_from_backward(optimizer) or not self.is_update:
            return
        call = "loop.step(optimizer, closure=closure)" if requires_closure(optimizer) else "loop.step(optimizer)"
        if (model := self.bypasses.find_reduced(self._prepared.record_of(optimizer).parameters)) is not None:
            raise LoopError(
                "updating the weights",
                found=f"gradients of {class_name(model)} are from loss.backward(), not loop.backward() (batch "
                f"{self.batch.index} of epoch {self.batch.epoch}), so they were averaged over ranks instead of "
                "samples, and the loop does not count the update",
                fix=f"Write loop.backward(loss) and {call} instead of loss.backward() and optimizer.step(). To weight "
                "the gradients differently, do not prepare the optimizer.",
                rank=self._group.rank,
            )

    def complete(self) -> None:
        """Check that the gradients are complete, and finish the exchange of this update, if it has one.

        Called before gradients are clipped or applied and at the end of the update, whichever comes first; then it is
        collective, if an exchange is due. Raises NonFiniteError on all ranks alike, and LoopError on a rank whose
        backward pass left a parameter out.
        """
        if not self._is_reduced:
            if self._prepared.ddp_models:
                self.reducers.check()
            self._is_reduced = True
        if self._is_due and not self._flags.is_under_way:
            self._begin()
        if self._flags.is_under_way:
            self._finish()

    def exchange(self) -> None:
        """Exchange the ranks' flags now, after the optimizers of this update have stepped. Collective."""
        self.complete()
        self._begin()
        self._finish()

    def exchange_between_epochs(self) -> None:
        """Exchange the ranks' flags. Collective."""
        self.leave()
        self._is_due = True
        self.complete()
        self.check_pending()

    def complete_left(self) -> None:
        """Raise NonFiniteError, on all ranks alike, for the updates before a `break` out of `batches`, once.

        Collective after a `break` or an exception, and waits for the device; otherwise it does nothing.
        """
        if self._is_left and self._finite is not None:
            self._is_left = False
            self._finite.find_pending()
            self._begin()  # an exception may have ended the last update of one rank before its check
            self._finish()

    def check_pending(self) -> None:
        """Raise NonFiniteError, on all ranks alike, if gradients of an earlier update were not finite.

        Collective if the gradients of the ranks differ. On an accelerator it waits for the device, whose results arrive
        late. Call it before weights are saved or evaluated.
        """
        if self._finite is not None and self._finite.find_pending() and not self.has_local:
            self._raise_nonfinite(self._finite)
        if self.has_local:
            self._begin()
            self._finish()
        self._means.check_arrived(waits=True)

    def _is_from_backward(self, optimizer: Optimizer) -> bool:
        """True if `backward` has computed gradients of `optimizer`, or any, if it is not one of several prepared."""
        optimizers = self._prepared.optimizers
        if not self.has_backward or len(optimizers) < 2 or optimizer in self._with_gradients:
            return self.has_backward
        return all(one is not optimizer for one in optimizers)

    def _check_backward(self, optimizer: Optimizer, own: OptimizerRecord) -> None:
        if self.batch is None or self._is_from_backward(optimizer):
            self.bypasses.check(own.parameters)
        elif any(parameter.grad is not None for parameter in own.parameters):
            raise LoopError(
                "updating the weights",
                found=f"there are gradients, and no loop.backward() computed them in this update (batch "
                f"{self.batch.index} of epoch {self.batch.epoch}), so they are not weighted by samples",
                fix="Write loop.backward(loss) instead of loss.backward(). Apply gradients that were not computed "
                "through the prepared model by optimizer.step().",
            )

    def check_norm(self, parameters: Sequence[torch.Tensor], norm: torch.Tensor | None = None) -> None:
        """Raise NonFiniteError, on all ranks alike, if gradients of `parameters`, or their `norm`, are not finite."""
        clipped = {id(parameter) for parameter in parameters}
        # The norm of gradients that were not all-reduced may differ between ranks.
        if self._finite is not None and clipped <= self._prepared.trained_ids:
            self._check_finite(parameters, norm)
            self._checked |= clipped

    def drop_unfinished(self) -> bool:
        """Leave the current batch. True if it was within an accumulation group, whose gradients are cleared."""
        unfinished = not self.is_update
        self.leave()
        self._is_left = True
        if unfinished:
            for prepared in self._prepared.models:
                prepared.clear_gradients()
        return unfinished

    def protect(self, parameters: Sequence[torch.Tensor]) -> None:
        """Before an optimizer steps, set gradients of its `parameters` that are not finite to zeros, on the device."""
        if self._finite is not None:
            self._finite.protect(parameters)

    def _check_finite(self, parameters: Sequence[torch.Tensor], norm: torch.Tensor | None = None) -> None:
        if self._finite is not None and self._finite.find(parameters, self.batch, norm):
            self._raise_nonfinite(self._finite)

    def _raise_nonfinite(self, finite: FiniteCheck) -> NoReturn:
        self._is_spoilt = True
        forget_errors(list(self._prepared))
        self._checked.clear()  # a program that catches the error may still step on these gradients
        raise_nonfinite(self._group, finite, self._prepared, self.batch)

    def _begin_backward(self) -> None:
        """Clear the gradients that a NonFiniteError has kept for inspection, and check all gradients again later."""
        self._forget_checks()
        if self._is_spoilt:
            self._is_spoilt = False
            for prepared in self._prepared.models:
                prepared.clear_gradients()
            self._groups.begin()

    def _forget_checks(self) -> None:
        """Check all gradients again before they are applied."""
        if self._checked:
            self._checked.clear()
        if self._finite is not None:
            self._finite.drop_unprotected()

    def _begin(self, count: float = 0.0, more: Sequence[float] = ()) -> None:
        if self._flags.is_under_way:
            self._finish()
        is_bad = self.is_update and self._finite is not None and self._finite.is_bad
        self._flags.begin(count=count, is_bad=is_bad, more=more)
        self._is_due = False

    def _finish(self) -> Decision:
        decision = self._flags.finish()
        if decision.num_bad and self._finite is not None:
            self._raise_nonfinite(self._finite)
        return decision

    def _sum_over_ranks(self, count: float, more: Sequence[float]) -> tuple[float, tuple[float, ...]]:
        self._begin(count, more)
        decision = self._finish()
        return decision.count, decision.more
