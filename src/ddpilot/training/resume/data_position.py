# SPDX-License-Identifier: Apache-2.0
"""`RunPosition`: a loop's epoch, batch and pass over a loader, saved and resumed; random states of epochs."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from ddpilot.checkpoint.manifest import RunProgress
from ddpilot.data.local_batch import mix_seed
from ddpilot.errors import MismatchedCheckpointError
from ddpilot.group.device import restore_rng
from ddpilot.group.init_group import seed_all

Facts = dict[str, Any]
_MAX_FACTS = 64
_PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True, eq=False)
class _Data:
    """The data of a pass, as far as a later pass can be compared with it."""

    dataset: Callable[[], object]
    """Returns the dataset while it exists, then None."""
    calls: tuple[tuple[CodeType, int], ...]
    """Code and line of each frame of the program in which the pass was begun, from the outermost one."""

    @classmethod
    def of(cls, loader: object) -> _Data:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
            frame = frame.f_back
        calls = []
        while frame is not None:
            calls.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return cls(_refer_to(loader), tuple(reversed(calls)))

    def may_be(self, now: _Data) -> bool:
        """True if the dataset is that of `now`, or if it no longer exists and the line of the program may be the same.

        A line that differs within one function or cell is a different pass of the same epoch.
        """
        if (before := self.dataset()) is not None:
            return before is now.dataset()
        for (code, line), (now_code, now_line) in zip(self.calls, now.calls, strict=False):
            if code is not now_code or line != now_line:
                return code is not now_code
        return True


class RunPosition:
    """The position of a loop in its training, the same on every rank.

    An epoch consists of one or more passes over loaders. A resumed epoch skips the passes that are complete, and starts
    the next one at the batch where it stopped.
    """

    def __init__(self, seed: int, rank: int, world_size: int, accumulation: int | str | None = 1) -> None:
        self.epoch = 0
        self.next_batch = 0
        self.num_updates = 0
        self.samples_seen = 0
        self.seed = seed
        self.accumulation = accumulation
        """Batches per update, or a text for a schedule; None if it is not known."""
        self._rank = rank
        self._world_size = world_size
        self._passes = 0
        self.facts: list[Facts] = []
        """Properties of the data of each pass in the epoch, as plain values."""
        self._data: list[_Data] = []
        self._num_to_skip = 0
        self._num_outside = 0
        self._resumed: RunProgress | None = None
        self._source = ""
        self._resumed_facts: Sequence[Facts] = ()
        self._rng: Mapping[str, Any] | None = None
        self._stream: tuple[int, Any] = (0, None)

    def go_to(self, epoch: int) -> None:
        """Set the position to the start of `epoch`."""
        self.epoch = epoch
        self._num_outside = 0
        self.begin_epoch()

    def begin_epochs(self) -> None:
        """Let `Loop.epochs` count the epochs: earlier passes outside of it are not counted."""
        self.epoch -= self._num_outside
        self._num_outside = 0

    def is_next_epoch(self, loader: object) -> bool:
        """True if a pass over `loader`, outside of `Loop.epochs`, would be the second one over its data in this epoch.

        The data is the same if the dataset is; or if the earlier dataset no longer exists, as when each epoch creates
        one, and length, batch sizes and the line of the program that began the pass are equal.
        """
        facts, now = describe_data(loader), _Data.of(loader)
        return any(known == facts and data.may_be(now) for known, data in zip(self.facts, self._data, strict=True))

    def begin_epoch_outside(self) -> None:
        """Advance to the next epoch, with a pass outside of `Loop.epochs`."""
        self.end_epoch()
        self.begin_epoch()
        self._num_outside += 1

    def begin_pass(self, loader: object, device: torch.device) -> bool:
        """Begin a pass and set its random state; returns False if a resumed epoch has already completed it.

        Raises MismatchedCheckpointError if the data of `loader` differ from those of the saved pass.
        """
        index = len(self.facts)
        if self._passes < self._num_to_skip:
            self._passes += 1
            self.facts.append(dict(self._resumed_facts[index]) if index < len(self._resumed_facts) else {})
            self._data.append(_Data.of(loader))
            return False
        facts = describe_data(loader)
        if self._resumed is not None and index < len(self._resumed_facts):
            before = self._resumed_facts[index]
            if not self.next_batch:  # a different batch size or order loses no samples then
                before = {name: value for name, value in before.items() if name == "dataset_length"}
            check_unchanged(before, facts, self._resumed.step, self.next_batch, self._source)
        if index < _MAX_FACTS:
            self.facts.append(facts)
            self._data.append(_Data.of(loader))
        self._set_random_state(device)
        return True

    @property
    def is_first_pass(self) -> bool:
        """True until the first pass of the epoch is complete."""
        return not self._passes

    def end_pass(self) -> None:
        """Mark the pass as complete, also if the loop over it was left by `break`."""
        self.next_batch = 0
        self._stream = (0, None)
        self._passes += 1

    def note_stream(self, next_batch: int, state: Any) -> None:
        """Record the `state` of the stream before batch `next_batch` of this pass; None if it has no state."""
        self._stream = (next_batch, state)

    def stream_state(self, next_batch: int) -> Any:
        """Return the state with which a stream resumes at batch `next_batch`; None if it is unknown."""
        known_batch, state = self._stream
        return state if next_batch and known_batch == next_batch else None

    def end_epoch(self) -> None:
        """Advance to the next epoch."""
        self.epoch += 1
        self._passes = self._num_to_skip = 0
        self._resumed = None

    def begin_epoch(self) -> None:
        """Forget the passes of the previous epoch, or of this one if it was left by `break`."""
        self._passes = 0
        self.facts, self._data = [], []

    def progress(self, next_batch: int) -> RunProgress:
        """Return the position for a checkpoint from which the epoch resumes at `next_batch`."""
        facts = self.facts[-1] if self.facts else {}
        return RunProgress(
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

    def restore(
        self,
        progress: RunProgress,
        facts: Sequence[Facts],
        rng: Mapping[str, Any] | None,
        other_data: bool,
        *,
        source: str = "",
        stream_state: Any = None,
    ) -> None:
        """Set the position to `progress`, from a checkpoint.

        `facts`: the saved value of `facts`. `rng`: random states to restore, for a position within a pass.
        `other_data`: True accepts different data at the start of an epoch. `source`: names the checkpoint in errors.
        `stream_state`: state of a stream within a pass.
        """
        self.epoch, self.next_batch = progress.epoch, progress.batch
        self.num_updates, self.samples_seen = progress.step, progress.samples_seen
        self._passes, self._num_to_skip, self._num_outside = 0, progress.passes, 0
        self.facts, self._data = [], []
        self._resumed, self._source = progress, source
        self._resumed_facts = () if other_data and not progress.batch else facts
        self._rng = rng if progress.batch else None
        self._stream = (progress.batch, stream_state)

    def _set_random_state(self, device: torch.device) -> None:
        if not self.next_batch:
            seed_epoch(self.seed, self.epoch, self._rank)
        elif self._rng is not None and self._resumed is not None:
            restore_rng(self._rng, device)
            if self._resumed.world_size != self._world_size:
                # The saved states of ranks do not apply to a different world_size.
                torch.manual_seed(mix_seed(self.seed, self.epoch, self._rank, self.next_batch))
        self._rng = None


def _refer_to(loader: object) -> Callable[[], object]:
    """Return a function that returns the dataset of `loader` while it exists, then None."""
    dataset = getattr(loader, "dataset", None)
    try:
        return weakref.ref(dataset)
    except TypeError:  # e.g. a list
        return lambda: dataset


def describe_data(loader: object) -> Facts:
    """Return the properties of the loader's data that a position in it depends on."""
    plan = getattr(loader, "plan", None)
    known = {
        "dataset_length": getattr(plan, "num_samples", None),
        "global_batch_size": getattr(plan, "global_batch_size", None),
        "batches": getattr(plan, "batches_fingerprint", None),
    }
    return {name: value for name, value in known.items() if value is not None}


_CHANGES = {
    "dataset_length": "the length of the dataset differs",
    "global_batch_size": "the position in the epoch counts global batches of a different size",
    "seed": "a different seed gives a different order of samples",
    "batches": "shuffle, drop_last, weights, the sampler or who divides the data differ from the saved run",
    "accumulate": "the rest of the epoch would make different updates",
}


def check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any], step: int, batch: int, source: str) -> None:
    """Raise MismatchedCheckpointError with the differences if `now` differs from `before`, the facts of a saved run.

    Values that are None or missing on one side are not compared. `step`, `batch`: the saved position; `source` names
    the checkpoint.
    """
    known = [name for name in _CHANGES if before.get(name) is not None and now.get(name) is not None]
    differing = [name for name in known if before[name] != now[name]]
    if len(differing) > 1 and "batches" in differing:
        differing.remove("batches")  # it follows from the other differences
    if not differing:
        return
    changes = []
    for name in differing:
        meaning = _CHANGES[name]
        if batch and name in ("dataset_length", "batches"):
            meaning += ", so the rest of the epoch would be different samples"
        values = f"`{name}` was {before[name]}, is {now[name]}"
        changes.append(meaning if name == "batches" else f"{values} ({meaning})")
    fix = "Resume"
    if differing == ["dataset_length"] and not batch:
        fix = "Continue with the new data by loop.resume(other_data=True), or fit(..., other_data=True). Or resume"
    raise MismatchedCheckpointError(
        f"resuming {source or 'a run'} at step {step}",
        found="; ".join(changes),
        fix=f"{fix} with the old values, start over with `resume=False`, or load only the weights (`loop.load`).",
    )


def seed_epoch(seed: int, epoch: int, rank: int) -> None:
    """Seed torch with (seed, epoch, rank), and `random` and numpy with (seed, epoch) only.

    Dropout must differ between ranks, or one mask applies to several samples of a batch. Decisions in Python (which
    branch, which size) must be the same on all ranks, or their collectives do not match.
    """
    seed_all(mix_seed(seed, epoch))
    torch.manual_seed(mix_seed(seed, epoch, rank))
