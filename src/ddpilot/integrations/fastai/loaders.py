# SPDX-License-Identifier: Apache-2.0
"""Share the batches of a data loader among ranks.

A batch of the notebook's loader is the global batch: it is cut into one piece per rank, so the number of batches, the
learning rate schedule and the samples of each step are the same as in one process.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.data
from fastai.data.load import DataLoader, _FakeLoader
from fastai.torch_core import apply, find_bs

from ddpilot.errors import GroupError
from ddpilot.group.device import capture_rng, restore_rng
from ddpilot.group.init_group import seed_all
from ddpilot.group.process_group import Group


def start_equal(run_id: str) -> None:
    """Seed this rank from `run_id`, which all ranks of a session share and no other session has."""
    seed_all(_derive(run_id.encode()))


@contextlib.contextmanager
def own_random(group: Group) -> Iterator[None]:
    """Context manager: ranks other than 0 draw their own random numbers. Collective.

    On entry, all ranks take rank 0's random state, and ranks other than 0 are then seeded from it and their rank. On
    exit, all ranks take rank 0's state. After an exception, the exit is not collective: all ranks get the same state,
    derived from the one on entry.
    """
    origin: dict[str, Any] = group.broadcast_object(capture_rng(group.device))
    restore_rng(origin, group.device)
    if group.rank:
        seed_all(_derive(_content(origin), b"rank %d" % group.rank))
    try:
        yield
        restore_rng(group.broadcast_object(capture_rng(group.device)), group.device)
    except BaseException:
        seed_all(_derive(_content(origin), b"after"))
        raise


@contextlib.contextmanager
def rank_zero_random(group: Group, loader: Any) -> Iterator[None]:
    """Context manager: all ranks draw from rank 0's random states, the global ones and the loader's own. Collective.

    On exit, the global random states of the other ranks are restored.
    """
    shared = getattr(loader, "rng", None)
    state, shared_state = group.broadcast_object((capture_rng(), shared.getstate() if shared else None))
    own = capture_rng()
    if group.rank:
        restore_rng(state)
        if shared is not None:
            shared.setstate(shared_state)
    try:
        yield
    finally:
        if group.rank:
            restore_rng(own)


def _content(states: dict[str, Any]) -> bytes:
    """Return bytes that are equal on all ranks; pickled tensors and their `repr` differ between runs."""
    parts = [*states["numpy"], *(state for name, state in states.items() if name != "numpy")]
    return repr([part.tolist() if isinstance(part, torch.Tensor) else part for part in parts]).encode()


def _derive(*parts: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=4).digest(), "little")


_OVERRIDABLE = ("create_batches", "sample", "chunkify", "__iter__")
_DELEGATED = ("randomize", "wif", "before_iter", "after_batch", "after_iter")
"""Methods that an `IndexShare` takes from its loader."""


class Share:
    """Sizes of the pieces of a shared loader's batches. Mixed into the loaders below."""

    group: Group
    sizes: list[list[int]]
    """Number of samples, by batch and rank."""
    position: int
    """Index of the batch that was yielded last, from 0."""

    @property
    def own_size(self) -> int:
        """Number of samples of the last batch on this rank; 0 if it got the batch's first sample as a substitute."""
        return self.sizes[self.position][self.group.rank]

    @property
    def whole_size(self) -> int:
        """Number of samples in the last batch on all ranks."""
        return sum(self.sizes[self.position])


class IndexShare(Share, DataLoader):  # type: ignore[misc]  # fastai is untyped
    """Loads only the samples of this rank's pieces, with the transforms of `loader`."""

    _default = "loader"

    def __init__(self, loader: Any, group: Group) -> None:
        self.loader, self.group = loader, group
        self.dataset, self.bs, self.n, self.drop_last = loader.dataset, loader.bs, loader.n, loader.drop_last
        self.pin_memory, self._device = loader.pin_memory, loader.device
        self.num_workers, self.offs = 1, 0  # set in each worker
        fake = loader.fake_l
        self.fake_l = _FakeLoader(
            self, fake.pin_memory, fake.num_workers, fake.timeout, fake.persistent_workers, fake.pin_memory_device
        )
        for name in _DELEGATED:
            setattr(self, name, getattr(loader, name))
        self.sizes, self.position = [], 0
        self.pieces: list[list[Any]] = []

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for self.position, batch in enumerate(super().__iter__()):
            yield batch

    def get_idxs(self) -> list[list[Any]]:
        """Return the sample indices of this rank's piece of every batch. Collective.

        Raises GroupError if the ranks have different orders.
        """
        self.it = None  # deleted at the end of an iteration, and must not be looked up in `loader`
        with rank_zero_random(self.group, self.loader):
            order = list(self.loader.get_idxs())
        self._check_order(order)
        step = self.bs
        batches = [order[start : start + step] for start in range(0, len(order), step)]
        if self.drop_last and batches and len(batches[-1]) < step:
            batches.pop()
        self.sizes = [share_sizes(len(batch), self.group.world_size) for batch in batches]
        # A rank without samples still takes part in every collective of the step, with the batch's first sample.
        self.pieces = [
            _own(batch, sizes, self.group.rank) or batch[:1] for batch, sizes in zip(batches, self.sizes, strict=True)
        ]
        return self.pieces

    def _check_order(self, order: list[Any]) -> None:
        digest = hashlib.blake2b(repr([int(index) for index in order]).encode()).hexdigest()
        if len(set(self.group.all_gather_object((len(order), digest)))) > 1:
            raise GroupError(
                "sharing a data loader among the ranks",
                found=f"its order differs between the ranks ({len(order)} samples on this rank)",
                fix="Create it from the same data on all ranks, and seed random draws",
                rank=self.group.rank,
            )

    def sample(self) -> Iterator[list[Any]]:
        """Return the pieces that the current worker has to load."""
        return (piece for i, piece in enumerate(self.pieces) if i % self.num_workers == self.offs)

    def create_batches(self, samps: Iterator[list[Any]]) -> Iterator[Any]:
        """Yield a batch for every piece."""
        for piece in samps:
            yield self.loader.do_batch([item for item in map(self.loader.do_item, piece) if item is not None])


class SliceShare(Share):
    """Loads whole batches of any loader and returns this rank's slice, for loaders without sample indices."""

    def __init__(self, loader: Any, group: Group) -> None:
        self.loader, self.group = loader, group
        self.sizes, self.position = [], 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's slices. Collective, once at the start."""
        self.sizes = []
        with rank_zero_random(self.group, self.loader):
            batches = iter(self.loader)
            first = next(batches, None)
        while first is not None:
            self.sizes.append(share_sizes(find_bs(first), self.group.world_size))
            self.position = len(self.sizes) - 1
            yield _slice(first, self.sizes[-1], self.group.rank)
            first = next(batches, None)


def can_share(loader: Any, world_size: int) -> bool:
    """Return True if `loader` is a fastai DataLoader with at least one sample per rank, or a torch DataLoader.

    A fastai DataLoader of unknown length counts as large enough. A list of batches cannot be shared, nor can a `Share`.
    """
    if isinstance(loader, Share):
        return False
    if isinstance(loader, DataLoader):
        return loader.n is None or loader.n >= world_size
    return isinstance(loader, torch.utils.data.DataLoader)


def share(loader: Any, group: Group) -> Any:
    """Return `loader` with this rank's pieces of its batches; unchanged if it cannot be shared."""
    if not can_share(loader, group.world_size):
        return loader
    counted = isinstance(loader, DataLoader) and loader.indexed and loader.bs is not None and loader.n is not None
    return IndexShare(loader, group) if counted and not _is_customized(loader) else SliceShare(loader, group)


def share_sizes(count: int, world_size: int) -> list[int]:
    """Return the number of samples by rank when `count` samples are divided as evenly as possible."""
    return [count * (rank + 1) // world_size - count * rank // world_size for rank in range(world_size)]


def _is_customized(loader: Any) -> bool:
    kind = type(loader)
    return any(name in vars(loader) or getattr(kind, name) is not getattr(DataLoader, name) for name in _OVERRIDABLE)


def _own(values: Any, sizes: list[int], rank: int) -> Any:
    start = sum(sizes[:rank])
    return values[start : start + sizes[rank]]


def _slice(batch: Any, sizes: list[int], rank: int) -> Any:
    return apply(lambda part: _own(part, sizes, rank) if sizes[rank] else part[:1], batch)
