# SPDX-License-Identifier: Apache-2.0
"""Detects losses that are not means over samples: sums, and means without a count of ignored targets or class weights.

torch's cross entropy divides by the weights of the targets that are not ignored. Ranks with equally many samples then
have means over different totals, and a mean of these by samples is not the mean of one process. Nor is a mean of the
ranks' sums the sum of one process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddpilot.errors import LoopError
from ddpilot.group.device import runs_behind
from ddpilot.training.async_scalars import PendingScalar, ScalarCopier
from ddpilot.training.batch_groups import CurrentBatch

_NONE, _MEAN, _SUM = range(3)
"""Values of `_saved_reduction`."""
_TERMS = ("AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0", "CloneBackward0", "_DDPSinkBackward")
"""Nodes between a loss and its terms that multiply and divide by nothing."""
_OF_EACH_SAMPLE = ("PowBackward0", "AbsBackward0")
"""Nodes whose rows are the losses of samples if there are as many."""
_MEANS = ("NllLossBackward0", "NllLoss2DBackward0")
_JOINS = ("AddBackward0", "StackBackward0", "CatBackward0")
_PASSED = (
    *_JOINS,
    "SubBackward0",
    "RsubBackward1",
    "MulBackward0",
    "MulBackward1",
    "DivBackward0",
    "DivBackward1",
    "NegBackward0",
    "SumBackward0",
    "MeanBackward0",
    "ToCopyBackward0",
    "CloneBackward0",
    "ViewBackward0",
    "SqueezeBackward0",
    "UnsqueezeBackward0",
    "_DDPSinkBackward",
    "BackwardHookFunctionBackward",
)
"""Nodes between a loss and the means that it is made of."""
_NUM_LATE = 8
"""Number of batches of each pass whose targets are checked on an accelerator."""
_TOLERANCE = 1e-6
"""Relative difference between sums of weights that are equal but for rounding."""


@dataclass(eq=False, slots=True)  # a frozen one would take four times as long to create
class _Found:
    """A cross entropy without a count, and bounds of how much less than its size each sample's total weight is."""

    least: PendingScalar | float
    most: PendingScalar | float
    key: tuple[object, ...]
    """The same for this cross entropy in each batch."""
    is_weighted: bool
    ignored: int
    """The target that is ignored."""
    is_single: bool
    """True if this rank has one sample of the batch."""
    batch: int
    epoch: int

    @property
    def is_there(self) -> bool:
        """True if the bounds are known without a wait for the device."""
        return not isinstance(self.most, PendingScalar) or self.most.is_there


class LossMeanCheck:
    """Detects losses without a count that are not means over samples. Not collective; waits for no device.

    A cross entropy that leaves out equally much of every sample, such as the last position of a causal language model,
    is a mean over samples. On the CPU every batch is checked. On an accelerator it is the first ones of each pass, and
    an error is raised by a later `check`, once the result has arrived.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_late = runs_behind(device)
        self._sender = ScalarCopier()
        self._pending: deque[_Found] = deque()
        self._single: dict[tuple[object, ...], float] = {}
        self._batch: CurrentBatch | None = None
        self._num_losses = 0

    def check(self, loss: torch.Tensor, batch: CurrentBatch | None, name: str = "", part: int | None = None) -> None:
        """Raise LoopError if `loss`, which has no count, contains a mean that is not one over the samples of `batch`.

        Call it before the backward pass. `name`: the name of the loss, if there are several. `part`: the index of the
        loader whose samples it is a mean over, if there are several.
        """
        if self._pending:
            self.check_arrived()
        if batch is None:
            return
        samples = batch if part is None or part >= len(batch.parts) else batch.parts[part]
        if not samples.count or samples.global_count == 1:
            return
        if batch is not self._batch:
            self._batch, self._num_losses = batch, 0
        self._num_losses += 1
        if self._is_late and batch.index >= _NUM_LATE:
            return
        nodes = _means(loss, samples.count)
        if len(nodes) >= samples.count > 1:
            return  # the program computes a mean for each sample
        for number, node in enumerate(nodes):
            found = self._inspect(node, batch, samples.count, (name, self._num_losses, number))
            if found is not None:
                self._pending.append(found)
        if self._pending:
            self.check_arrived()

    @staticmethod
    def check_sum(loss: torch.Tensor, batch: CurrentBatch | None, name: str = "", part: int | None = None) -> None:
        """Raise LoopError if a term of `loss` is a sum over this rank's samples of `batch`, with a count or without."""
        if batch is None:
            return
        samples = batch if part is None or part >= len(batch.parts) else batch.parts[part]
        if samples.count < 2 or not _has_sum(loss, samples.count):
            return
        of_name = f" {name!r}" if name else ""
        raise LoopError(
            f"running backward in batch {batch.index} of epoch {batch.epoch}",
            found=f"the loss{of_name} contains a sum over this rank's samples, and has to be their mean; averaged over "
            "ranks, sums would give different results at each number of ranks",
            fix='Divide the sum by what it is over, or use reduction="mean": the learning rate of a sum then has to be '
            "multiplied by the batch size. A sum over something other than samples is accepted as 1.0 * loss.",
        )

    def check_arrived(self, *, waits: bool = False) -> None:
        """Raise LoopError for what `check` found before, as far as it is known. `waits`: wait for the device."""
        while self._pending and (waits or self._pending[0].is_there):
            found = self._pending.popleft()
            least, most = (one.read() if isinstance(one, PendingScalar) else one for one in (found.least, found.most))
            known = self._single.setdefault(found.key, least) if found.is_single else least
            if max(most, known) - min(least, known) > _TOLERANCE * max(1.0, abs(most)):
                self._pending.clear()
                raise self._error(found)

    def _inspect(self, node: Any, batch: CurrentBatch, count: int, key: tuple[object, ...]) -> _Found | None:
        """Return what to check of the mean at `node`; None if it is known to be one over samples."""
        target, weight, ignored = node._saved_target, node._saved_weight, node._saved_ignore_index
        ignored -= 2**64 * (ignored >= 2**63)  # torch gives it without a sign
        least: PendingScalar | float = 0.0
        most: PendingScalar | float = 0.0
        if self._is_late or weight is not None or node._saved_total_weight.item() != target.numel():
            bounds = _left_out(target, weight, ignored, count).aminmax()
            least, most = map(self._sender.send, bounds) if self._is_late else (one.item() for one in bounds)
        elif count > 1:
            return None
        return _Found(least, most, key, weight is not None, ignored, count == 1, batch.index, batch.epoch)

    def _error(self, found: _Found) -> LoopError:
        if found.is_weighted:
            what = "with class weights and no count: its mean is over the weights of its targets, which differ in sum"
            count = "weight[target].sum()"
        else:
            what = f"that ignores targets of {found.ignored} and has no count: its mean is over the rest, which "
            what += "differ in number"
            count = f"(target != {found.ignored}).sum()"
        of_name = f" {found.key[0]!r}" if found.key[0] else ""
        return LoopError(
            f"running backward in batch {found.batch} of epoch {found.epoch}",
            found=f"the loss{of_name} contains a cross entropy {what} between samples; weighted by samples, it "
            "would give different results at each number of ranks",
            fix=f"Pass the count: loop.backward(loss, count={count}); a Trainer's `loss_fn` returns "
            f"(loss, {count}). If the loss has further terms, pass them by name: "
            f'{{"class": (loss, {count}), "penalty": penalty}}.',
        )


@torch.no_grad()
def _left_out(target: torch.Tensor, weight: torch.Tensor | None, ignored: int, count: int) -> torch.Tensor:
    """Return how much less than its number of targets the total weight of each of `count` samples is, shape (count,).

    Shape (2,), with 0 and the sum, if the targets cannot be divided among samples.
    """
    flat = target.reshape(-1)
    is_kept = flat != ignored
    kept = is_kept.to(torch.float32 if flat.device.type == "mps" else torch.float64)
    if weight is not None:
        kept *= weight[torch.where(is_kept, flat, 0)]
    if len(kept) % count:
        return (len(kept) - kept.sum()) * torch.arange(2, device=kept.device)
    return len(kept) // count - kept.reshape(count, -1).sum(1)


def _means(loss: torch.Tensor, count: int) -> list[Any]:
    """Return the nodes of means over targets that `loss` is made of.

    A sum with a single term, and one sample on this rank: the program may compute a mean for each sample.
    """
    waiting, seen, means = [loss.grad_fn], {loss.grad_fn}, []
    while waiting:
        node = waiting.pop()
        kind = type(node).__name__
        if kind in _MEANS and node._saved_reduction == _MEAN:  # type: ignore[union-attr]
            means.append(node)
        if node is None or kind not in _PASSED:
            continue
        following = [one for one, _ in node.next_functions if one is not None]
        if kind in _JOINS and len(following) == 1 and count == 1:
            continue
        waiting += [one for one in following if one not in seen]
        seen.update(following)
    return means


def _has_sum(loss: torch.Tensor, count: int) -> bool:
    """True if a term of `loss` is a sum over `count` samples."""
    node: Any
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        kind = type(node).__name__
        if kind in _TERMS:
            following = {one for one, _ in node.next_functions} - seen
            waiting += following
            seen |= following
        elif kind == "SumBackward0":
            inner = node.next_functions[0][0]
            is_each = type(inner).__name__ in _OF_EACH_SAMPLE or getattr(inner, "_saved_reduction", None) == _NONE
            if is_each and _is_of_samples(inner, node._saved_self_sym_sizes, count):
                return True
        elif getattr(node, "_saved_reduction", None) == _SUM and _is_of_samples(node, node._saved_self.shape, count):
            return True
    return False


def _is_of_samples(node: Any, shape: Sequence[int], count: int) -> bool:
    """True if `node` reduces `count` samples, or steps of each, and is not a penalty of a parameter."""
    is_penalty = type(node.next_functions[0][0]).__name__ == "AccumulateGrad"
    is_flattened = type(node).__name__ in _MEANS
    return bool(shape) and not is_penalty and (shape[0] == count or (is_flattened and shape[0] % count == 0))
