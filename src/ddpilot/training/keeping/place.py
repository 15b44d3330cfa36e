# SPDX-License-Identifier: Apache-2.0
"""Where a loop is: epoch, batch and pass over a loader; what it was saved as, and going on from there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ddpilot.training.checkpoint.manifest import Progress
from ddpilot.training.checkpoint.rng import restore_rng
from ddpilot.training.seeding import seed_epoch, seed_middle

Facts = dict[str, Any]
_MAX_FACTS = 64


class Place:
    """The position of a loop in its training, the same on every rank.

    An epoch is one or several passes over loaders. A resumed one leaves out those that it has behind it, and begins
    the next in the middle where it was left there.
    """

    def __init__(self, seed: int, rank: int, world_size: int, accumulation: int = 1) -> None:
        self.epoch = 0
        self.next_batch = 0
        self.num_updates = 0
        self.samples_seen = 0
        self.seed = seed
        self.accumulation = accumulation
        """Batches that make one update."""
        self._rank = rank
        self._world_size = world_size
        self._passes = 0
        self._facts: list[Facts] = []
        self._data: list[Callable[[], object]] = []
        self._num_to_skip = 0
        self._num_outside = 0
        self._resumed: Progress | None = None
        self._source = ""
        self._resumed_facts: Sequence[Facts] = ()
        self._rng: Mapping[str, Any] | None = None
        self._stream: tuple[int, Any] = (0, None)

    def go_to(self, epoch: int) -> None:
        """Be at `epoch`, of which no pass has begun."""
        self.epoch = epoch
        self._num_outside = 0
        self.begin_epoch()

    def begin_epochs(self) -> None:
        """From now on epochs are counted by `Loop.epochs`: passes before it were none of them."""
        self.epoch -= self._num_outside
        self._num_outside = 0

    def is_next_epoch(self, loader: object) -> bool:
        """Would a pass over `loader`, outside of `Loop.epochs`, be the second one over its data in this epoch?

        The same data is the same dataset; or one of the same length in batches of the same sizes, in place of a dataset
        that is gone, as where a dataset is made for each epoch.
        """
        facts, dataset = describe_data(loader), getattr(loader, "dataset", None)
        return any(
            known == facts and ((before := refer()) is None or before is dataset)
            for known, refer in zip(self._facts, self._data, strict=True)
        )

    def begin_epoch_outside(self) -> None:
        """The next epoch begins, with a pass outside of `Loop.epochs`."""
        self.end_epoch()
        self.begin_epoch()
        self._num_outside += 1

    def begin_pass(self, loader: object, device: torch.device) -> bool:
        """Begin a pass, with its random state; False where a resumed epoch has it behind it already.

        Raises MismatchedCheckpointError where `loader` has other data than the one that the resumed pass was over.
        """
        index = len(self._facts)
        if self._passes < self._num_to_skip:
            self._passes += 1
            self._facts.append(dict(self._resumed_facts[index]) if index < len(self._resumed_facts) else {})
            self._data.append(_refer_to(loader))
            return False
        facts = describe_data(loader)
        if self._resumed is not None and index < len(self._resumed_facts):
            self._check(facts, self._resumed_facts[index])
        if index < _MAX_FACTS:
            self._facts.append(facts)
            self._data.append(_refer_to(loader))
        self._set_random_state(device)
        return True

    def end_pass(self) -> None:
        """All of it was read, or the loop over it was left for good."""
        self.next_batch = 0
        self._stream = (0, None)
        self._passes += 1

    def note_stream(self, next_batch: int, state: Any) -> None:
        """Before batch `next_batch` of this pass, its stream has `state`; None where it has none to say."""
        self._stream = (next_batch, state)

    def stream_state(self, next_batch: int) -> Any:
        """What a stream needs to go on with batch `next_batch`; None where it is not known."""
        known_batch, state = self._stream
        return state if next_batch and known_batch == next_batch else None

    def end_epoch(self) -> None:
        """The next epoch begins."""
        self.epoch += 1
        self._passes = self._num_to_skip = 0
        self._resumed = None

    def begin_epoch(self) -> None:
        """Forget the passes of the epoch before, or of this one where it was left by `break`."""
        self._passes = 0
        self._facts, self._data = [], []

    def progress(self, next_batch: int) -> Progress:
        """What a checkpoint says of this place, when the epoch goes on with `next_batch`."""
        facts = self._facts[-1] if self._facts else {}
        return Progress(
            step=self.num_updates,
            epoch=self.epoch,
            batch=next_batch,
            passes=self._passes,
            samples_seen=self.samples_seen,
            seed=self.seed,
            world_size=self._world_size,
            accumulate=self.accumulation,
            **facts,
        )

    @property
    def facts(self) -> list[Facts]:
        """What is known of the data of each pass of the epoch, as plain values."""
        return self._facts

    def go_on(
        self,
        progress: Progress,
        facts: Sequence[Facts],
        rng: Mapping[str, Any] | None,
        other_data: bool,
        *,
        source: str = "",
        stream_state: Any = None,
    ) -> None:
        """Be where `progress` says.

        `facts`: as they were then; `rng`: random state to go on with, for a place in the middle of a pass.
        `other_data`: an epoch may begin with other data. `source` names the checkpoint in errors. `stream_state`: of a
        stream in the middle of a pass.
        """
        self.epoch, self.next_batch = progress.epoch, progress.batch
        self.num_updates, self.samples_seen = progress.step, progress.samples_seen
        self._passes, self._num_to_skip, self._num_outside = 0, progress.passes, 0
        self._facts, self._data = [], []
        self._resumed, self._source = progress, source
        self._resumed_facts = () if other_data and not progress.batch else facts
        self._rng = rng if progress.batch else None
        self._stream = (progress.batch, stream_state)

    def _check(self, now: Facts, before: Facts) -> None:
        assert self._resumed is not None  # the caller has looked
        # Where an epoch begins, another batch size or order loses no sample.
        names = before.keys() if self.next_batch else before.keys() & {"dataset_length"}
        Progress(step=self._resumed.step, batch=self.next_batch, **before).require(
            source=self._source, **{name: now.get(name) for name in names}
        )

    def _set_random_state(self, device: torch.device) -> None:
        if not self.next_batch:
            seed_epoch(self.seed, self.epoch, self._rank)
        elif self._rng is not None and self._resumed is not None:
            restore_rng(self._rng, device)
            if self._resumed.world_size != self._world_size:
                seed_middle(self.seed, self.epoch, self._rank, self.next_batch)
        self._rng = None


def _refer_to(loader: object) -> Callable[[], object]:
    """The dataset of `loader` as long as it is there, None after that."""
    dataset = getattr(loader, "dataset", None)
    try:
        return weakref.ref(dataset)
    except TypeError:  # a list, say
        return lambda: dataset


def describe_data(loader: object) -> Facts:
    """What of the loader's data has to be the same for a position in it to mean the same."""
    plan = getattr(loader, "plan", None)
    known = {
        "dataset_length": getattr(plan, "num_samples", None),
        "global_batch_size": getattr(plan, "global_batch_size", None),
        "batches": getattr(plan, "batches_fingerprint", None),
    }
    return {name: value for name, value in known.items() if value is not None}
