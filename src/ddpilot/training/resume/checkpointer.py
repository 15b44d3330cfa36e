# SPDX-License-Identifier: Apache-2.0
"""`RunCheckpointer`: saves a loop's state when due, resumes from it, and exits for a scheduler to requeue."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from ddpilot.checkpoint.collective import RNG, CollectiveCheckpoints, on_all_ranks
from ddpilot.checkpoint.directory import CheckpointDir, parse_best, tell_stderr
from ddpilot.checkpoint.format import Checkpoint
from ddpilot.checkpoint.host_copy import can_hold, measure
from ddpilot.checkpoint.manifest import RunProgress
from ddpilot.errors import CorruptCheckpointError, LoopError
from ddpilot.group.protocol import GroupLike
from ddpilot.launching.rank_environment import EXIT_REQUEUE
from ddpilot.training.coordination.stop import FlagExchange
from ddpilot.training.options import CheckpointOptions
from ddpilot.training.resume.position import RunPosition
from ddpilot.training.resume.tracked_state import TrackedState, Weights

_FACTS = "passes"
_STREAM = "stream"
_REQUEUE = ("SIGTERM", "SIGUSR1")


class RunCheckpointer:
    """The checkpoints of a loop. Creating one is collective if there are `options`; without them it does nothing.

    `check`: called on all ranks before each save; raises if the weights must not be saved. Raises LoopError for invalid
    options, and CheckpointError on all ranks if the directory is not writable.
    """

    def __init__(
        self,
        group: GroupLike,
        things: TrackedState,
        place: RunPosition,
        decider: FlagExchange,
        check: Callable[[], None],
        options: CheckpointOptions | None,
    ) -> None:
        self._group = group
        self._check = check
        self._things = things
        self._place = place
        self._decider = decider
        self._options = options
        self._joint: CollectiveCheckpoints | None = None
        self._has_begun = self._is_measured = self._is_stream_missed = False
        self.is_in_epochs = False
        """True while `Loop.epochs` counts the epochs."""
        self._is_asked = self._is_unsaid = self._is_metric_missed = False
        self._resumed = ""
        self._best = parse_best(None if options is None else options.best)
        self._metrics: dict[str, float] = {}
        self._num_updates = self._num_updates_saved = 0
        self._saved_s = time.monotonic()
        self.first_update = 0
        """Number of updates made before; checkpoints with at most this many are not resumed."""
        self.held_up_s = 0.0
        """Total seconds that training has waited for checkpoints."""
        if options is not None:
            self._joint = CollectiveCheckpoints(
                group, CheckpointDir(options.checkpoint_dir, keep=options.keep, best=options.best)
            )
            self._joint.check_writable()

    def begin(self) -> None:
        """Resume from the latest checkpoint or start over, before the first epoch. Collective at the first call.

        Raises CheckpointError, on all ranks alike, if an object cannot be saved, before training starts.
        """
        if self._joint is None or self._options is None:
            return
        if not self._has_begun and self._options.resume:
            self.resume()
        elif not self._has_begun and (aside := self._joint.set_aside()) is not None:
            self._tell(f"starts from scratch; the checkpoints that were in {self._joint.folder.path} are in {aside}")
        self._has_begun = True
        if not self._is_measured:
            self._measure()

    def resume(self, *, other_data: bool = False) -> bool:
        """Implement `Loop.resume`. Collective."""
        joint = self._require("resuming")
        if self._place.num_updates != self.first_update or self._has_begun:
            raise self._refuse("resuming", "training has begun already", "Resume before the first epoch.")
        self._has_begun = True
        try:
            found = joint.latest()
        except CorruptCheckpointError as error:
            error.fix = (
                "Restore one from a copy; or start from scratch with `resume=False`, which moves what is there aside."
            )
            raise
        if found is None or 0 < found.manifest.progress.step <= self.first_update:
            return False
        restore = on_all_ranks(self._group, lambda: self._match(found))
        restore()
        same_size = found.manifest.progress.world_size == self._group.world_size
        part = found.part(self._group.rank if same_size else 0) or {}
        facts = part.get(_FACTS, ())
        self._place.go_on(
            found.manifest.progress,
            facts,
            part.get(RNG),
            other_data,
            source=str(found.path),
            stream_state=part.get(_STREAM),
        )
        self._resumed = say_resumed(
            found.path, found.manifest.progress, self._group.world_size, self._place.accumulation
        )
        return True

    def say_resumed(self) -> None:
        """Report the position that the run resumes from, once training or an evaluation begins. Not collective."""
        if self._resumed:
            self._tell(self._resumed)
            self._resumed = ""

    def say_if_finished(self, num_epochs: int) -> None:
        """Report instead that the run is finished, if it has made `num_epochs` epochs. Not collective."""
        if self._resumed and self._place.epoch >= num_epochs:
            self._resumed = ""
            self._tell(say_finished(self._require("resuming").folder.path, self._place.epoch, num_epochs))

    def say_nothing_left(self) -> None:
        """Report that a resumed stream ends at or before the position to resume from."""
        self._tell(say_nothing_left(self._place.epoch, self._place.next_batch))

    def ask(self, metrics: Mapping[str, float] | None, *, in_batch: bool) -> None:
        """Implement `Loop.save`. Collective outside of epochs and batches."""
        self._require("saving")
        self._metrics = {name: float(value) for name, value in (metrics or {}).items()}
        if self._best is not None and metrics is not None and self._best[0] not in self._metrics:
            found = f"`best` is {self._said_best()!r}, and the metrics are {', '.join(map(repr, metrics)) or 'none'}"
            raise self._refuse("saving", found, "Give the metric under the name that `best` has.")
        self._is_asked = True
        if not in_batch and not self.is_in_epochs:
            self._save(self._place.next_batch)
            self.wait()

    def after_update(self, next_batch: int, *, leaves: bool) -> None:
        """Save if it is due, and always if all ranks stop. Collective if it saves.

        Raises SystemExit(75) on all ranks if they stop because of SIGTERM or SIGUSR1, once the checkpoint is on disk.
        """
        if self._joint is None or self._options is None:
            return
        self._num_updates += 1
        if self._num_updates == 1:  # the optimizer has its state from now on
            num_bytes = self._measure()
            if self._group.is_rank_zero:
                self._joint.folder.reserve(num_bytes)
        if self._is_due(self._joint, self._options) or leaves:
            self._save(next_batch)
        if leaves:
            self.leave()

    @property
    def has_latest(self) -> bool:
        """True on rank 0 if the directory has a checkpoint to resume; False on the other ranks. Not collective."""
        return self._joint is not None and self._group.is_rank_zero and (self._joint.folder.path / "latest").exists()

    def end_epoch(self) -> None:
        """Advance to the next epoch and save. Collective."""
        self._place.end_epoch()
        if self._joint is not None:
            if self._best is not None and self._best[0] not in self._metrics and not self._is_metric_missed:
                self._is_metric_missed = True
                self._tell(say_no_metric(self._said_best(), self._best[0]))
            self._save(0)

    def leave(self) -> None:
        """Wait for the last save when all ranks stop.

        Raises SystemExit(75) if a signal requested the stop. Collective.
        """
        if self._joint is None:
            return
        is_written = self.wait()
        names = [reason for reason in self._decider.reasons if reason in _REQUEUE]
        if names:
            self._exit(names[0], is_written)
        said = [say_left(reason, self._joint.folder.path, is_written) for reason in self._decider.reasons]
        if self._is_unsaid and any(said):
            self._tell(next(filter(None, said)))
        self._is_unsaid = False

    def wait(self) -> bool:
        """Wait for the last save. True if it is on disk, the same on all ranks. Collective."""
        return self._joint is None or self._joint.wait()

    def release(self) -> None:
        """Wait for pending writes, and let other processes write to the directory. Not collective."""
        if self._joint is not None and self._group.is_rank_zero:
            self._joint.folder.close()

    def __enter__(self) -> RunCheckpointer:
        self.is_in_epochs = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave `epochs`. Not collective: one rank may exit alone, with an exception."""
        self.is_in_epochs = False
        if kind is None:
            self.say_resumed()
        if self._joint is None:
            return
        if self._is_asked:
            self._is_asked = False
            self._tell(SAVED_BEFORE if kind is None else LEFT_BY_BREAK)
        self.release()

    def _match(self, found: Checkpoint) -> Callable[[], None]:
        progress = found.manifest.progress
        accumulate = self._place.accumulation if progress.batch else None
        progress.require(source=str(found.path), seed=self._place.seed, accumulate=accumulate)
        return self._things.match(found)

    def _is_due(self, joint: CollectiveCheckpoints, options: CheckpointOptions) -> bool:
        every, every_s = options.save_every_updates, options.save_every_s
        is_due = self._decider.take_save() or self._is_asked
        is_due |= every is not None and self._num_updates - self._num_updates_saved >= every
        if self._group.is_rank_zero:
            joint.folder.poll()
            if not is_due and every_s is not None and time.monotonic() - self._saved_s >= every_s:
                self._decider.ask_save()
        return is_due

    def _save(self, next_batch: int) -> None:
        began_s = time.perf_counter()
        joint = self._require("saving")
        self._check()
        weights, state = self._collect()
        joint.save(
            self._place.progress(next_batch),
            weights=weights,
            state=state,
            part={_FACTS: self._place.facts, **self._stream_state(next_batch)},
            metrics=self._metrics,
        )
        self._is_asked, self._is_unsaid, self._metrics = False, True, {}
        self._num_updates_saved = self._num_updates
        self._saved_s = time.monotonic()
        self.held_up_s += time.perf_counter() - began_s

    def _stream_state(self, next_batch: int) -> dict[str, Any]:
        """Return the state with which the current stream resumes there; {} if there is none or it cannot be saved."""
        state = self._place.stream_state(next_batch)
        if state is None:
            return {}
        if can_hold(state):
            return {_STREAM: state}
        if not self._is_stream_missed:
            self._is_stream_missed = True
            self._tell(STREAM_NOT_SAVED)
        return {}

    def _measure(self) -> int:
        self._is_measured = True
        weights, state = self._collect()
        return on_all_ranks(self._group, lambda: measure({"weights": weights, "state": state}))

    def _collect(self) -> tuple[Weights, dict[str, Any]]:
        """Return the state to save. An error on one rank, e.g. in a `state_dict()`, is raised on all. Collective."""
        return on_all_ranks(self._group, lambda: self._things.collect(self._group))

    def _exit(self, name: str, is_written: bool) -> NoReturn:
        path = self._require("leaving").folder.path
        self._tell(
            f"{name}: {say_saved(path, is_written)}; leaving epoch {self._place.epoch} with exit code {EXIT_REQUEUE}. "
            "The same command resumes there."
        )
        raise SystemExit(EXIT_REQUEUE)

    def _tell(self, text: str) -> None:
        if self._group.is_rank_zero:
            tell_stderr(text)

    def _require(self, did: str) -> CollectiveCheckpoints:
        if self._joint is None:
            raise self._refuse(did, "this loop has no directory for checkpoints", "Make it with `checkpoint_dir=`.")
        return self._joint

    def _said_best(self) -> str:
        return str(self._options and self._options.best)

    def _refuse(self, did: str, found: str, fix: str) -> LoopError:
        return LoopError(did, found=found, fix=fix, rank=self._group.rank)


SAVED_BEFORE = (
    "loop.save() makes no second checkpoint of an epoch that all ranks left in its middle: a run resumes from "
    "the one that was made there."
)
LEFT_BY_BREAK = (
    "a checkpoint that loop.save() asked for was not made: the epoch was left before its end. To end training early, "
    "call loop.stop() instead of `break`."
)
STREAM_NOT_SAVED = (
    "what the dataset's state_dict() returns cannot be saved: a run that continues from here reads the stream from its "
    "start and leaves out what lies before. Return numbers, texts, tensors, and dicts, lists and tuples of them."
)
_REASONS = {"SIGINT": "Ctrl-C", "time": "the time is up (`max_time_s`)"}


def say_resumed(path: Path, progress: RunProgress, world_size: int, accumulation: int) -> str:
    """Return the resume message: position, and settings that changed."""
    place = f"epoch {progress.epoch}" + (f", batch {progress.batch}" if progress.batch else "")
    counts = " (`loop.batch.index` counts from there; enumerate() begins at 0)" if progress.batch else ""
    sizes = f", on {world_size} rank{'s' * (world_size > 1)}"
    if progress.world_size != world_size:
        sizes += f" instead of {progress.world_size}"
    if progress.accumulate not in (None, accumulation):
        sizes += f", with accumulate={accumulation} instead of {progress.accumulate}"
    return f"continues from {path}: {place}, after {progress.step} updates{sizes}{counts}"


def say_finished(folder: Path, num_done: int, num: int) -> str:
    """Return the message that a resumed run has no epochs left."""
    return (
        f"the run in {folder} is finished: it has made {num_done} epochs, and {num} are asked for. Ask for more epochs "
        "to train longer, or start from scratch with `resume=False`."
    )


def say_left(reason: str, folder: Path, is_written: bool) -> str | None:
    """Return the message for a run that Ctrl-C or the time limit stopped; None for other reasons."""
    if reason not in _REASONS:
        return None
    goes_on = ". The same lines resume there." if is_written else "."
    return f"{_REASONS[reason]}: {say_saved(folder, is_written)}{goes_on}"


def say_saved(folder: Path, is_written: bool) -> str:
    """Return whether the last checkpoint was written, as text."""
    return f"the checkpoint in {folder} is written" if is_written else "the last checkpoint could not be written"


def say_no_metric(best: str, name: str) -> str:
    """Return the message that the metric of `best` was not given."""
    return (
        f"there is no best checkpoint: `best` is {best!r}, and this epoch's has no {name!r}. Give it in the epoch: "
        f"loop.save({{{name!r}: ...}})."
    )


def say_nothing_left(epoch: int, batch: int) -> str:
    """Return the message that a resumed stream has no batches left."""
    return (
        f"nothing was left of epoch {epoch}, which resumes at batch {batch}: the stream has none there. If it was "
        "longer before, it is a different one now."
    )
