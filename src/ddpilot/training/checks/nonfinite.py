# SPDX-License-Identifier: Apache-2.0
"""Detects losses and gradients that are NaN or infinite, and reports batch, samples and the ranks they are from."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ddpilot.errors import NonFiniteError, list_names
from ddpilot.group.device import runs_behind
from ddpilot.group.protocol import GroupLike
from ddpilot.training.async_scalars import PendingScalar, ScalarCopier
from ddpilot.training.batch_groups import CurrentBatch
from ddpilot.training.models.ddp import reduces_in_fp16, unwrap
from ddpilot.training.models.sharding import has_shards, is_shard, is_true_everywhere, local_part, local_parts

_NUM_NAMED = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUM_KEPT = 256
_ONE = torch.ones(1, device="cpu")


class Place(NamedTuple):
    """A batch without its data, which would stay in memory."""

    epoch: int
    batch: int
    sample_ids: NDArray[np.int64]
    """Indices of this rank's samples."""
    group_size: int = 1

    @classmethod
    def of(cls, batch: CurrentBatch) -> Place:
        """Return the place of `batch`."""
        return cls(batch.epoch, batch.index, batch.sample_ids, batch.group_size)

    def __str__(self) -> str:
        """Return epoch, batch and samples as text."""
        named = list_names([str(number) for number in self.sample_ids.tolist()], _NUM_NAMED)
        return f"epoch {self.epoch}, batch {self.batch}, " + (f"of samples {named}" if named else "of no samples")


class _Update(NamedTuple):
    """Gradients of an update on an accelerator whose check has not reached the host yet."""

    is_finite: PendingScalar
    place: Place | None
    """The last batch of the update."""


class FiniteCheck:
    """Detects losses and gradients that are not finite, without communication.

    A loss that is not finite makes the gradients of its rank NaN (`seed`), so all ranks find the same in the
    all-reduced gradients; on the CPU at once. On an accelerator, that would make the host wait for the device in every
    update. There `protect` sets the gradients of such an update to zeros, on the device, and the host is notified
    later: `is_bad` is True once the result has arrived on this rank, which the ranks exchange with their other flags,
    and `find_pending` waits for it.
    """

    def __init__(self, device: torch.device, sender: ScalarCopier | None = None) -> None:
        self._is_late = runs_behind(device)
        self._seen: deque[tuple[torch.Tensor, Place | None, str]] = deque(maxlen=_NUM_KEPT)
        self._bad: list[str] = []
        self._sender = sender or ScalarCopier()
        self._pending: deque[_Update] = deque()
        self._found: _Update | None = None
        self._unprotected: list[tuple[frozenset[int], torch.Tensor]] = []
        self.probes = GradientProbes()
        """Records gradients of this rank before the all-reduce."""

    def differ(self) -> None:
        """From now on, gradients are not the same on all ranks: raise only after an exchange of `is_bad`."""
        self._is_late = True

    def seed(
        self, loss: torch.Tensor, weight: float, batch: CurrentBatch | None, name: str = ""
    ) -> torch.Tensor | float:
        """Return the initial gradient for the backward pass of `loss`: `weight`, or NaN if `loss` is not finite.

        Records the loss for the report. `name`: the loss's name, if there are several.
        """
        if self.probes.watches:
            self.probes.begin(None if batch is None else Place.of(batch))
        if self._is_late:
            self._seen.append((loss.detach(), None if batch is None else Place.of(batch), name))
            return (loss.detach() * 0).add_(weight)
        if not math.isfinite(value := loss.item()):
            self._bad.append(_describe(value, None if batch is None else Place.of(batch), name))
            return math.nan
        return weight

    @property
    def is_bad(self) -> bool:
        """True if this rank knows of a loss that is not finite, even if its gradient reaches no parameter.

        On an accelerator: of gradients that are not finite, as far as the device has come; other ranks may know less.
        """
        while self._pending and self._found is None and self._pending[0].is_finite.is_there:
            self._read()
        return bool(self._bad) or self._found is not None

    def find(
        self,
        parameters: Sequence[torch.Tensor],
        batch: CurrentBatch | None = None,
        norm: torch.Tensor | None = None,
    ) -> bool:
        """True if the all-reduced gradients of `parameters` are not finite. The same on all ranks.

        On an accelerator it always returns False and queues the check for `protect` and `find_pending`. `norm`: their
        total norm, if it is known. `batch`: the last one of the update.
        """
        gradients = [gradient for one in parameters if (gradient := one.grad) is not None]
        if norm is None and has_shards(gradients):
            if not self._is_late:
                return not are_finite_everywhere(gradients)
            norm = _sharded_size(gradients)
        if not self._is_late:
            return not (are_finite(gradients) if norm is None else math.isfinite(norm.item()))
        if gradients:
            is_finite = torch.isfinite(largest(gradients) if norm is None else norm.detach())
            self._unprotected.append((frozenset(map(id, parameters)), is_finite))
            self._pending.append(_Update(self._sender.send(is_finite), None if batch is None else Place.of(batch)))
        return False

    def protect(self, parameters: Sequence[torch.Tensor]) -> None:
        """Set the gradients of `parameters` to zeros if `find` saw one that is not finite. On accelerators only.

        Does not wait for the device. Finite gradients remain unchanged, bit for bit. A check of more parameters than
        these also applies to the rest of them, in a later call: the norm of one clip may cover several optimizers.
        """
        if not self._unprotected:
            return
        ids = set(map(id, parameters))
        flags = [flag for of, flag in self._unprotected if not of.isdisjoint(ids)]
        self._unprotected = [(rest, flag) for of, flag in self._unprotected if (rest := of - ids)]
        if not flags:
            return
        for one in parameters:  # elements may share memory in gradients that the user set
            if one.grad is not None and not one.grad.is_sparse and not is_shard(one.grad) and 0 in one.grad.stride():
                one.grad = one.grad.clone(memory_format=torch.contiguous_format)
        zero_unless(flags, local_parts([one.grad for one in parameters if one.grad is not None]))

    def drop_unprotected(self) -> None:
        """Forget the gradients that wait for `protect`: they are cleared or checked again before they are applied."""
        if self._unprotected:
            self._unprotected.clear()

    def find_pending(self) -> bool:
        """True if gradients of an earlier `find` were not finite and have not been reported yet. Waits for the device.

        The same on all ranks.
        """
        while self._pending and self._found is None:
            self._read()
        return self._found is not None

    def _read(self) -> None:
        update = self._pending.popleft()
        self._found = None if update.is_finite.read() else update

    def report(self, models: Iterable[nn.Module], batch: CurrentBatch | None) -> Report:
        """Return what this rank knows of values that are not finite, and clear it.

        On the CPU, the update is the one that ends with `batch`.
        """
        place = None if batch is None else Place.of(batch)
        if self._is_late:
            place = None if self._found is None else self._found.place
        updated = "" if place is None else str(place)
        if place is not None and place.group_size > 1:
            updated = f"the update of {place.group_size} batches that ends with {place}"
        seen = [(loss.item(), where, name) for loss, where, name in self._seen]
        late = [_describe(*one) for one in seen if not math.isfinite(one[0])]
        # On an accelerator, `protect` has set the gradients to zeros.
        described = describe_parameters(models, with_gradients=not self._is_late)
        losses = "; ".join([*[*self._bad, *late][:_NUM_NAMED], described]) if self._bad or late else ""
        own = self.probes.find(None if self._found is None else self._found.place)
        for records in (self._bad, self._seen, self._pending, self._unprotected):
            records.clear()
        self._found = None
        self.probes.forget()
        return Report(updated, losses, "" if own is None else str(own), described)


class Report(NamedTuple):
    """What one rank knows of values that are not finite."""

    updated: str
    """Epoch, batch and this rank's samples of the update whose gradients are not finite; "" if it is unknown."""
    losses: str
    """Its losses that are not finite; "" if all were."""
    own: str
    """Where a gradient of this rank was not finite before the all-reduce; "" if none was or it is unknown."""
    described: str
    """The names of weights and gradients that are not finite."""


def are_finite(gradients: list[torch.Tensor]) -> bool:
    """True if every element is finite. Waits for a device."""
    if not gradients:
        return True
    if gradients[0].device.type != "cpu":
        return math.isfinite(largest(gradients).item())
    found = torch.zeros(1, device="cpu")
    try:
        # The kernel of GradScaler checks all of them in one call; a scale of 1 leaves them unchanged.
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, _ONE)
    except RuntimeError:  # it does not support sparse and complex gradients, or elements that share memory
        return all(map(_is_finite, gradients))
    return not found.item()


def are_finite_everywhere(gradients: list[torch.Tensor]) -> bool:
    """True if every element of sharded gradients is finite on all ranks. Collective. Waits for a device."""
    own = are_finite([part for part in local_parts(gradients) if part.numel()])
    return is_true_everywhere(own, gradients).item() > 0


def _sharded_size(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return 1 if every element is finite on all ranks, else NaN; shape (). Collective. Does not wait for the device.

    A rank may have no element of a gradient that is not finite.
    """
    parts = [part for part in local_parts(gradients) if part.numel()]
    own = torch.isfinite(largest(parts)) if parts else True
    lowest = is_true_everywhere(own, gradients).to(local_part(gradients[0]).device)
    return torch.where(lowest > 0, 1.0, math.nan)


def _is_finite(tensor: torch.Tensor) -> bool:
    tensor = local_part(tensor)
    values = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor
    return bool(torch.isfinite(values).all())


def largest(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest absolute value, shape (): finite exactly if all of `gradients` are, in any dtype."""
    filled = [plain for one in gradients if (plain := _plain(one)).numel()]
    return torch.nn.utils.get_total_norm(filled, math.inf) if filled else gradients[0].new_zeros(())


@torch.no_grad()
def zero_unless(flags: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Set all of `gradients` to zeros, in place, unless all `flags` (bool, shape ()) are True.

    Does not wait for a device. Multiplies their bits as integers of the same width: times 1 changes nothing, and times
    0 turns NaN into 0.
    """
    is_finite = flags[0]
    for flag in flags[1:]:
        is_finite = is_finite & flag.to(is_finite.device, non_blocking=True)
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in map(_plain, gradients):
        kind = _INTEGERS[gradient.element_size()]
        groups.setdefault((gradient.device, kind), []).append(gradient.view(kind))
    for (device, kind), bits in groups.items():
        torch._foreach_mul_(bits, is_finite.to(device=device, dtype=kind, non_blocking=True))


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    """Return the real values of `gradient` as a view that shares its memory."""
    if gradient.layout is torch.sparse_coo:
        gradient = gradient._values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _describe(value: float, place: Place | None, name: str) -> str:
    return f"the loss{f' {name!r}' if name else ''} is {value}" + ("" if place is None else f" in {place}")


def describe_parameters(models: Iterable[nn.Module], *, with_gradients: bool = True) -> str:
    """Return the names of weights and gradients that are not finite, at most eight of each."""
    named = [(name, p) for model in models for name, p in unwrap(model).named_parameters()]
    weights = [name for name, p in named if not _is_finite(p)]
    text = f"weights that are not finite: {list_names(weights, _NUM_NAMED) or 'none'}"
    if not with_gradients:
        return text
    gradients = [name for name, p in named if p.grad is not None and not _is_finite(p.grad)]
    return f"{text}; gradients: {list_names(gradients, _NUM_NAMED) or 'none'}"


def raise_nonfinite(
    group: GroupLike, check: FiniteCheck, models: Iterable[nn.Module], batch: CurrentBatch | None
) -> NoReturn:
    """Raise NonFiniteError on every rank, with the reports of all ranks. Collective: call it once all ranks know.

    `batch`: the current batch of the ranks.
    """
    models = list(models)
    check.find_pending()  # this rank may know less than the rank that reported it
    mine = check.report(models, batch)
    reports = group.all_gather_object(mine) if group.world_size > 1 else [mine]
    by_rank = [(rank, one.losses) for rank, one in enumerate(reports) if one.losses]
    if by_rank:
        raise NonFiniteError(
            "computing the loss",
            found="; ".join(f"on rank {rank} {text}" for rank, text in by_rank),
            fix="Check those samples first. Weights that are not finite point to an earlier step: use a smaller "
            "learning rate, or clip_grad_norm_(); finite weights point to data or loss. With check_finite=False, Loop "
            "and fit continue.",
            rank=by_rank[0][0],
        )
    fp16 = 'Gradients are all-reduced in fp16 (max 65,504); comm="bf16" has the range of fp32. '
    own = {rank: f"rank {rank}, in {one.own}" for rank, one in enumerate(reports) if one.own}
    places = "; ".join(f"rank {rank} in {one.updated}" for rank, one in enumerate(reports) if one.updated)
    found = f"on {'; on '.join(own.values())}, they are not finite" if own else "their sum over ranks is not finite"
    raise NonFiniteError(
        "computing gradients",
        found=f"{found}, though every rank's loss was finite; "
        f"{'' if own else places + '; ' * bool(places)}{mine.described}",
        fix=f"{fp16 * any(map(reduces_in_fp16, models))}Check those samples, and look for a square root, a logarithm "
        "or a division by zero in the loss or the model; torch.autograd.set_detect_anomaly(True) finds the line. With "
        "check_finite=False, Loop and fit continue.",
        rank=next(iter(own), group.rank),
    )


_NUM_LAST = 2
_NUM_WHOLE = 4096
_NUM_PASSES_KEPT = 128
"""Maximum number of entries, batches and gradients together, without those of the current batch."""
_IGNORED = Place(-1, -1, np.empty(0, dtype=np.int64))
"""Stands before gradients to ignore."""

_Kept = deque[Place | torch.Tensor | None]
"""A batch, followed by the gradients of its backward passes, then the next batch. None is a missing gradient: DDP
passes None for an output that the loss does not use."""


def _first_hook(kept: _Kept, order: list[int], number: int) -> Callable[[torch.Tensor | None], None]:
    """Return the hook of one parameter that records the order of gradients, until the last ones are known."""

    def hook(gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            order.append(number)
            kept.append(_small(gradient))

    return hook


def _hook(kept: _Kept, size: int) -> Callable[[torch.Tensor], None]:
    """Return the hook of the one parameter that remains watched; for a small one, no Python code runs in backward."""
    return kept.append if size <= _NUM_WHOLE else lambda gradient: kept.append(_small(gradient))


def _small(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return `gradient`, or its sum if it is large: not finite whenever an element is not finite."""
    return gradient if gradient is None or gradient.numel() <= _NUM_WHOLE else gradient.sum()


class _Watched(NamedTuple):
    order: list[int]
    """Indices of parameters in the order of their gradients in the first backward passes."""
    parameters: list[nn.Parameter]
    stops: list[Callable[[], object]]


class GradientProbes:
    """Keeps a small local gradient of each model, from before the all-reduce, for a few updates.

    It belongs to a parameter close to the input, determined in the first backward pass: a NaN that appears anywhere in
    backward reaches it. Nothing is computed or waited for until `find`.
    """

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self.watches = False
        """True if a module is watched; otherwise backward passes need not be announced."""
        self._unsettled: set[int] = set()
        self._kept: _Kept = deque()
        self._last: tuple[int, int] | None = None

    def watch(self, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        """Watch `module`, whose DDP waits for `parameters`; replaces an earlier watch of the same module."""
        order: list[int] = []
        self.watches = True
        given = list(parameters)
        self._unwatch(id(module))
        stops = [self._listen(one, _first_hook(self._kept, order, number)) for number, one in enumerate(given)]
        self._watched[id(module)] = _Watched(order, given, stops)
        self._unsettled.add(id(module))

    def _listen(self, parameter: nn.Parameter, hook: Callable[..., None]) -> Callable[[], object]:
        """Register `hook` on `parameter`.

        Returns a function that removes it, which is also called when this object is garbage-collected.
        """
        stop: Callable[[], object] = parameter.register_hook(hook).remove  # type: ignore[no-untyped-call]
        weakref.finalize(self, stop)  # the parameter may outlive the loop
        return stop

    def _unwatch(self, key: int) -> None:
        for stop in self._watched.pop(key, _Watched([], [], [])).stops:
            stop()

    def begin(self, place: Place | None) -> None:
        """Announce a backward pass of this rank's samples of a batch."""
        if not self._watched or place is None:
            self.pause()
            return
        if self._unsettled and place[:2] != self._last:
            self._settle()
        self._last = place[:2]
        self._mark(place)

    def _settle(self) -> None:
        """For each model, keep watching only the smallest of the parameters whose gradients came last."""
        for key in [key for key in self._unsettled if self._watched[key].order]:
            order, parameters, _ = self._watched[key]
            last = list(dict.fromkeys(reversed(order)))[:_NUM_LAST]
            chosen = min((parameters[number] for number in last), key=nn.Parameter.numel)
            self._unwatch(key)
            stop = self._listen(chosen, _hook(self._kept, chosen.numel()))
            self._watched[key] = _Watched(order, parameters, [stop])
            self._unsettled.discard(key)

    def pause(self) -> None:
        """Announce a backward pass without samples, whose gradients are ignored."""
        self._mark(_IGNORED)

    def _mark(self, place: Place) -> None:
        while len(self._kept) > _NUM_PASSES_KEPT:
            self._kept.popleft()
        self._kept.append(place)

    def find(self, last: Place | None) -> Place | None:
        """Return where a gradient of this rank was first not finite, preferably not after the batch `last`."""
        bad: list[Place] = []
        place = _IGNORED
        for one in self._kept:
            if isinstance(one, Place):
                place = one
            elif one is not None and place is not _IGNORED and not _is_finite(one):
                bad.append(place)
        earlier = [one for one in bad if last is None or one[:2] <= last[:2]]
        return next(iter(earlier or bad), None)

    def forget(self) -> None:
        """Clear the recorded gradients."""
        self._kept.clear()
