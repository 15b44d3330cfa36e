# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients that are NaN or infinite: noticed by all ranks alike, told with what was in the batch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ddpilot.errors import NonFiniteError
from ddpilot.group.protocol import GroupLike
from ddpilot.training.grouping import CurrentBatch
from ddpilot.training.tapping import Taps
from ddpilot.training.wrapping import crosses_as_fp16, unwrap

_NUM_NAMED = 8
_NUM_KEPT = 256


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a loss was computed; the batch itself would keep its data in memory."""

    epoch: int
    index: int
    sample_ids: NDArray[np.int64]

    @classmethod
    def of(cls, batch: CurrentBatch | None) -> _Place | None:
        return None if batch is None else cls(batch.epoch, batch.index, batch.sample_ids)

    def __str__(self) -> str:
        """Epoch, batch and samples."""
        named = _names([str(number) for number in self.sample_ids.tolist()])
        return f"epoch {self.epoch}, batch {self.index}, " + (f"of samples {named}" if named else "of no samples")


class FiniteWatch:
    """Notices losses and gradients that are not finite, at no cost in communication.

    A loss that is not finite makes the gradients of its rank NaN (`seed`), so that all ranks find the same in the sum
    of all ranks' gradients: at once, but on CUDA one update later, since to look at what is still being computed would
    make the host wait for the device in every step.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_late = device.type == "cuda"
        self._seen: deque[tuple[torch.Tensor, _Place | None, str]] = deque(maxlen=_NUM_KEPT)
        self._bad: list[str] = []
        self._pending: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._gradients = Gradients()
        self.taps = Taps()
        """What this rank alone computed, of which the sum says nothing."""

    def seed(
        self, loss: torch.Tensor, weight: float, batch: CurrentBatch | None, name: str = ""
    ) -> torch.Tensor | float:
        """What the backward of `loss` begins with: `weight`, or NaN where `loss` is not finite. Remembers it.

        `name`: of one of several losses.
        """
        self.taps.begin(batch)
        if self._is_late:
            self._seen.append((loss.detach(), _Place.of(batch), name))
            return (loss.detach() * 0).add_(weight)
        if not math.isfinite(value := loss.item()):
            self._bad.append(_describe(value, _Place.of(batch), name))
            return math.nan
        return weight

    @property
    def is_bad(self) -> bool:
        """Is a loss of this rank known not to be finite? For those whose gradient reaches no parameter."""
        return bool(self._bad)

    def find(self, gradients: list[torch.Tensor], norm: torch.Tensor | None = None) -> bool:
        """Are `gradients`, summed over all ranks, not finite? On CUDA: those of the call before.

        `norm`: of all of them, where it is known. The same on all ranks.
        """
        if not self._is_late:
            return not (self._gradients.are_finite(gradients) if norm is None else math.isfinite(norm.item()))
        is_bad = self.find_pending()
        if gradients:
            self._pending = _look_later(torch.nn.utils.get_total_norm(gradients) if norm is None else norm)
        return is_bad

    def find_pending(self) -> bool:
        """Were the gradients of the last `find` not finite, where that was not looked at yet?"""
        if self._pending is None:
            return False
        (flag, event), self._pending = self._pending, None
        event.synchronize()
        return not math.isfinite(flag.item())

    def updated_with(self, batch: CurrentBatch | None) -> str:
        """Where the gradients are from that `find` said were not finite, in the update that ends with `batch`.

        Epoch, batch and samples of this rank; of an update of several batches, the last. "" where that is not known.
        """
        place = _Place.of(batch)
        if self._is_late:
            begun = _begun(batch)
            places = [one for _, one, _ in self._seen if one and (begun is None or (one.epoch, one.index) < begun)]
            place = places[-1] if places else None
        if place is not None and batch is not None and batch.group_size > 1:
            return f"the update of {batch.group_size} batches that ends with {place}"
        return "" if place is None else str(place)

    def find_own(self, batch: CurrentBatch | None) -> str:
        """Where a gradient of this rank was not finite before ranks were summed; "" where none was, or none is known.

        `batch`: as for `updated_with`. Nothing of it is remembered.
        """
        where = self.taps.find(_is_finite, _begun(batch) if self._is_late else None)
        self.taps.forget()
        return "" if where is None else str(_Place(*where))

    def say(self, models: Iterable[nn.Module]) -> str:
        """What this rank saw: losses that were not finite, and which parameters and gradients are not. "" for none."""
        seen = [(loss.item(), place, name) for loss, place, name in self._seen]
        late = [_describe(*one) for one in seen if not math.isfinite(one[0])]
        losses = [*self._bad, *late]
        self._bad.clear()
        self._seen.clear()
        return "; ".join([*losses[:_NUM_NAMED], describe_parameters(models)]) if losses else ""


class Gradients:
    """Looks at gradients while the host waits."""

    def __init__(self) -> None:
        self._one, self._found = torch.ones(1, device="cpu"), torch.zeros(1, device="cpu")
        self._are_plain = True

    def are_finite(self, gradients: list[torch.Tensor]) -> bool:
        """Is every element finite?"""
        if not gradients:
            return True
        if gradients[0].device.type != "cpu":
            # The norm is not finite where an element is not, but may overflow without one.
            return math.isfinite(torch.nn.utils.get_total_norm(gradients).item()) or all(map(_is_finite, gradients))
        if self._are_plain:
            try:
                # What fp16's scaler uses goes over all of them in one call; times one, everything stays as it is.
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, self._one)
                if self._found.item():
                    self._found.zero_()
                    return False
                return True
            except RuntimeError:  # it takes none that are sparse or complex, or whose elements share memory
                self._are_plain = False
        return all(map(_is_finite, gradients))


def _begun(batch: CurrentBatch | None) -> tuple[int, int] | None:
    """Epoch and batch with which the update began that ends with `batch`."""
    return None if batch is None else (batch.epoch, batch.index - batch.group_size + 1)


def _is_finite(tensor: torch.Tensor) -> bool:
    values = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor
    return bool(torch.isfinite(values).all())


def _look_later(norm: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    flag = torch.empty((), dtype=norm.dtype, pin_memory=True)
    flag.copy_(norm.detach(), non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return flag, event


def _describe(value: float, place: _Place | None, name: str) -> str:
    return f"the loss{f' {name!r}' if name else ''} is {value}" + ("" if place is None else f" in {place}")


def describe_parameters(models: Iterable[nn.Module]) -> str:
    """Which weights and which gradients are not finite, by name, at most eight of each."""
    named = [(name, p) for model in models for name, p in unwrap(model).named_parameters()]
    weights = [name for name, p in named if not _is_finite(p)]
    gradients = [name for name, p in named if p.grad is not None and not _is_finite(p.grad)]
    return f"weights that are not finite: {_names(weights) or 'none'}; gradients: {_names(gradients) or 'none'}"


def _names(names: list[str]) -> str:
    more = "" if len(names) <= _NUM_NAMED else f" and {len(names) - _NUM_NAMED} more"
    return ", ".join(names[:_NUM_NAMED]) + more


def raise_nonfinite(
    group: GroupLike, watch: FiniteWatch, models: Iterable[nn.Module], batch: CurrentBatch | None
) -> None:
    """Raise NonFiniteError on every rank, with what each rank saw. Collective: to be called once all ranks know.

    `batch`: the one that the ranks are at.
    """
    models = list(models)
    mine = watch.updated_with(batch), watch.say(models), watch.find_own(batch)
    said = group.all_gather_object(mine) if group.world_size > 1 else [mine]
    by_rank = [(rank, text) for rank, (_, text, _) in enumerate(said) if text]
    if by_rank:
        raise NonFiniteError(
            "computing the loss",
            found="; ".join(f"on rank {rank} {text}" for rank, text in by_rank),
            fix="Look at those samples first. Weights that are not finite point to an earlier step: a smaller learning "
            "rate, or clip_grad_norm_(); finite weights point to data or loss. "
            "check_finite=False, of Loop or of fit, goes on.",
            rank=by_rank[0][0],
        )
    fp16 = (
        'They cross as fp16, which ends at 65,504: comm="bf16" does not. ' if any(map(crosses_as_fp16, models)) else ""
    )
    own = {rank: f"rank {rank}, in {place}" for rank, (_, _, place) in enumerate(said) if place}
    places = "; ".join(f"rank {rank} in {place}" for rank, (place, _, _) in enumerate(said) if place)
    found = f"on {'; on '.join(own.values())}, they are not finite" if own else "their sum over ranks is not finite"
    raise NonFiniteError(
        "computing gradients",
        found=f"{found}, though every rank's loss was finite; {'' if own else places + '; ' * bool(places)}"
        f"{describe_parameters(models)}",
        fix=f"{fp16}Look at those samples, and for a square root, a logarithm or a division by zero in the loss or the "
        "model; torch.autograd.set_detect_anomaly(True) finds the line. check_finite=False, of Loop or fit, goes on.",
        rank=next(iter(own), group.rank),
    )
