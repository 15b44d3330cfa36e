# SPDX-License-Identifier: Apache-2.0
"""Identify the DDP model and gradient bucket that an all_reduce of torch's C++ reducer belongs to.

Nothing here may call the reducer or its logger: the reducer holds its lock while it starts an all_reduce, so the rank
would deadlock. The order of buckets is computed in Python instead, and read from what the ranks broadcast.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpilot.record.accelerator import HostCopies, HostCopy

MAX_NAMES = 100
_MAX_SEARCHES = 3


@dataclass(frozen=True, eq=False)
class Bucket:
    """The bucket that a reducer's all_reduce over `num_elements` elements reduces. `fact` describes it in the ring."""

    num_elements: int
    fact: dict[str, Any]


class _Model:
    """A DDP model, and which of its buckets is reduced next: the reducer takes them in order in every backward."""

    def __init__(self, model: Any) -> None:
        self.ref = weakref.ref(model)
        self.unused = Bucket(-1, {})
        self._reducer: weakref.ref[Any] | None = None
        self._parameters: list[tuple[str, int]] = []
        """Names and sizes instead of references: the program may delete the model."""
        self._buckets: list[Bucket] = []
        self._next = 0
        self._broadcasts: list[Any] = []
        self._arriving: list[HostCopy] = []
        """The new bucket order that the ranks have agreed on, being copied from the device."""
        self._num_unnamed = 0
        """Number of elements of the buckets reduced since then."""

    @property
    def is_reordering(self) -> bool:
        """True while the ranks agree on new buckets."""
        return bool(self._broadcasts or self._arriving)

    def take(self, num_elements: int) -> Bucket | None:
        """Return the next bucket if it has `num_elements` elements."""
        model = self.ref()
        reducer = getattr(model, "reducer", None)
        if reducer is None:
            return None
        # For example after the model was bound to a new group.
        if self._reducer is None or self._reducer() is not reducer:
            self._reducer = weakref.ref(reducer)
            self._read_first_order(model)
        if self._broadcasts and len(self._broadcasts) == 2 and all(tensor.is_cpu for tensor in self._broadcasts):
            self._read_new_order(model, self._broadcasts)
        number, buckets = self._next, self._buckets
        if number >= len(buckets) or buckets[number].num_elements != num_elements:
            return None
        self._next = (number + 1) % len(buckets)
        return buckets[number]

    def restart(self) -> None:
        """Expect the first bucket next, because the last backward was interrupted."""
        self._next = 0

    def add_broadcast(self, tensor: Any) -> None:
        """Keep `tensor`, broadcast while ranks agree on new buckets: first the parameters, then the bucket lengths."""
        self._broadcasts = [*self._broadcasts[-1:], tensor]

    def passes_unnamed(self, num_elements: int) -> bool:
        """True if this model's new buckets are not known yet, as nothing waits for the device. Counts the elements.

        The new order is read after the backward in which it was requested, when the first bucket comes next.
        """
        model = self.ref()
        if model is None:
            return False
        if len(self._broadcasts) == 2 and not any(tensor.is_cpu for tensor in self._broadcasts):
            copies = [_copies().begin(tensor) for tensor in self._broadcasts]
            if None not in copies:  # None while a device graph is captured
                self._broadcasts, self._arriving, self._num_unnamed = [], copies, 0  # type: ignore[assignment]
        if not self._arriving:
            return False
        is_over = self._num_unnamed >= sum(size for _, size in self._parameters)
        if is_over and all(copy.has_arrived() for copy in self._arriving):
            self._read_new_order(model, [copy.numbers for copy in self._arriving])
            while self._arriving:
                self._arriving.pop().release()
            return False
        self._num_unnamed = num_elements if is_over else self._num_unnamed + num_elements
        return True

    def _read_first_order(self, model: Any) -> None:
        from torch._C import _distributed_c10d as c10d

        self._broadcasts, self._arriving = [], []
        parameters, is_sparse = model._build_params_for_reducer()
        names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._parameters = [(names.get(id(parameter), "?"), parameter.numel()) for parameter in parameters]
        self.unused = Bucket(len(self._parameters), {"what": "unused parameters", "model": _name_of(model)})
        if model.static_graph or not model.find_unused_parameters:
            limits = [sys.maxsize]
        else:
            first = getattr(getattr(model, "_bucket_config", None), "first_bucket_bytes_cap", None)
            limits = [c10d._DEFAULT_FIRST_BUCKET_BYTES if first is None else first, model.bucket_bytes_cap]
        order, _ = c10d._compute_bucket_assignment_by_size(parameters, limits, is_sparse)
        self._set_order(model, order[::-1])

    def _read_new_order(self, model: Any, broadcasts: Sequence[Any]) -> None:
        # Both broadcasts are over when the next backward begins. Both tensors are padded; the last element of the
        # parameters is the number of buckets.
        members, lengths = (tensor.flatten().tolist() for tensor in broadcasts)
        self._broadcasts = []
        remaining = iter(members[: len(self._parameters)])
        # Two models that agree in alternation may receive each other's order. Padding is uninitialized and may be
        # negative.
        order = [list(itertools.islice(remaining, length)) for length in lengths if 0 < length <= len(self._parameters)]
        if sorted(itertools.chain(*order)) == list(range(len(self._parameters))):
            self._set_order(model, [bucket for bucket in order if bucket])

    def _set_order(self, model: Any, order: Sequence[Sequence[int]]) -> None:
        self._next = 0
        self._buckets = []
        for index, members in enumerate(order):
            parameters = [self._parameters[at] for at in members]
            shown = [name for name, _ in parameters]
            if len(shown) > MAX_NAMES:
                shown = [*shown[: MAX_NAMES - 1], shown[-1]]
            fact = {"what": "bucket", "model": _name_of(model), "index": index, "num_buckets": len(order)}
            fact |= {"num_parameters": len(members), "names": shown}
            self._buckets.append(Bucket(sum(size for _, size in parameters), fact))


class BucketTable:
    """The live DDP models: those passed to `add`, and others found by a search of all live objects."""

    def __init__(self, ddp_class: type) -> None:
        self._ddp_class = ddp_class
        self._models: list[_Model] = []
        self._num_searches = 0

    def add(self, model: Any) -> _Model:
        """Register `model`, a `DistributedDataParallel`."""
        self._models = [known for known in self._models if known.ref() is not None]
        for known in self._models:
            if known.ref() is model:
                return known
        self._models.append(_Model(model))
        return self._models[-1]

    def match(self, num_elements: int) -> Bucket | None:
        """Return the bucket that the reducer's all_reduce over `num_elements` elements reduces; None if unknown."""
        is_unnamed = False
        for model in self._models:
            if model.is_reordering and model.passes_unnamed(num_elements):
                is_unnamed = True
        if is_unnamed:
            return None
        bucket = self._take(num_elements)
        if bucket is None:
            for model in self._models:
                if num_elements == model.unused.num_elements:
                    return model.unused
                model.restart()
            bucket = self._take(num_elements)
        if bucket is None and self._search():
            bucket = self._take(num_elements)
        return bucket

    def _take(self, num_elements: int) -> Bucket | None:
        for model in self._models:
            bucket = model.take(num_elements)
            if bucket is not None:
                return bucket
        return None

    def _search(self) -> bool:
        # A search of all objects takes tens of milliseconds, so it is repeated at most `_MAX_SEARCHES` times.
        if self._num_searches >= _MAX_SEARCHES:
            return False
        self._num_searches += 1
        before = len(self._models)
        for found in gc.get_objects():
            if issubclass(type(found), self._ddp_class):
                self.add(found)
        return len(self._models) > before


@functools.cache
def _copies() -> HostCopies:
    from ddpilot.record.accelerator import HostCopies

    return HostCopies()


def _name_of(model: Any) -> str:
    return type(model.module).__name__
