# SPDX-License-Identifier: Apache-2.0
"""`RunCheckpointer`: saves a loop's state when due, resumes from it, and exits for a scheduler to requeue."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

from ddpilot.checkpoint.collective import RNG, CollectiveCheckpoints, on_all_ranks
from ddpilot.checkpoint.directory import CheckpointDir, write_stderr
from ddpilot.checkpoint.format import Checkpoint
from ddpilot.checkpoint.host_copy import can_hold, measure
from ddpilot.checkpoint.manifest import Monitor, RunProgress
from ddpilot.errors import CorruptCheckpointError, LoopError
from ddpilot.group.protocol import GroupLike
from ddpilot.launching.rank_environment import EXIT_REQUEUE
from ddpilot.training.coordination.stop import FlagExchange
from ddpilot.training.notices import warn_unsaved
from ddpilot.training.options import CheckpointOptions
from ddpilot.training.resume.data_position import RunPosition, check_unchanged
from ddpilot.training.resume.tracked_state import OWN, Shards, TrackedState, Weights

_FACTS = "passes"
_STREAM = "stream"
_REQUEUE = ("SIGTERM", "SIGUSR1")
_REASONS = {"SIGINT": "Ctrl-C", "time": "`max_time_s` is over"}


class RunCheckpointer:
    """The checkpoints of a loop; does nothing without a `checkpoint_dir`. Creating one is collective with one.

    `check`: called on all ranks before each save; raises if the weights must not be saved. Raises LoopError for options
    without a directory, and CheckpointError on all ranks if the directory is not writable.
    """

    def __init__(
        self,
        group: GroupLike,
        tracked: TrackedState,
        position: RunPosition,
        flags: FlagExchange,
        check: Callable[[], None],
        options: CheckpointOptions,
    ) -> None:
        self._group = group
        self._check = check
        self._tracked = tracked
        self._position = position
        self._flags = flags
        self._options = options
        self._checkpoints: CollectiveCheckpoints | None = None
        self._has_begun = self._is_measured = False
        self.is_in_epochs = False
        """True while `Loop.epochs` counts the epochs."""
        self._is_requested = self._is_unreported = self._is_postponed = False
        self._report_once = functools.cache(self._report)
        self._saves_by: Literal["nothing", "unsaved epoch", "user"] = (
            "user" if options.checkpoint_dir is None else "nothing"
        )
        self._resumed = ""
        self._best = None if options.best is None else Monitor.parse(options.best)
        self._metrics: dict[str, float] = {}
        self._num_updates = self._num_updates_saved = 0
        self._interval = options.interval
        self._step_saved = 0
        """Number of updates of the training at the last save or at the start."""
        self._is_skipped = False
        """True if an epoch has ended without a save, because of `save_every`."""
        self._saved_s = time.monotonic()
        self.first_update = 0
        """Number of updates made before; checkpoints with at most this many are not resumed."""
        self.held_up_s = 0.0
        """Total seconds that training has waited for checkpoints."""
        if options.checkpoint_dir is None:
            options.check_unused()
            self._saves_by = "user"
            return
        folder = CheckpointDir(
            options.checkpoint_dir, keep=options.keep, best=options.best, staging_dir=options.staging_dir
        )
        self._checkpoints = CollectiveCheckpoints(group, folder)
        self._checkpoints.check_writable()

    def begin(self) -> None:
        """Resume from the latest checkpoint or start over, before the first epoch. Collective at the first call.

        Raises CheckpointError, on all ranks alike, if an object cannot be saved, before training starts.
        """
        if self._checkpoints is None:
            return
        if not self._has_begun and self._options.resume:
            self.resume()
        elif not self._has_begun and (earlier := self._checkpoints.set_aside()) is not None:
            folder = self._checkpoints.folder.where
            then = "were moved to" if isinstance(earlier, Path) else "stay there and are listed in"
            self._report(f"starting over (resume=False); the checkpoints in {folder} {then} {earlier}")
        self._has_begun = True
        if not self._is_measured:
            self._measure()

    def resume(self, *, other_data: bool = False) -> bool:
        """Implement `Loop.resume`. Collective."""
        checkpoints = self._require("resuming")
        self._saves_by = "user"
        if self._position.num_updates != self.first_update or self._has_begun:
            raise self._error("resuming", "training has begun already", "Resume before the first epoch.")
        self._has_begun = True
        try:
            found = checkpoints.latest()
        except CorruptCheckpointError as error:
            error.fix = "Restore one from a copy; or start over with `resume=False`, which moves the damaged ones away."
            raise
        if found is None or 0 < found.manifest.progress.step <= self.first_update:
            return False
        progress = found.manifest.progress
        restore = on_all_ranks(self._group, lambda: self._match(found))
        lacking = on_all_ranks(self._group, restore)
        self._step_saved = progress.step
        is_same_size = progress.world_size == self._group.world_size
        part = found.part(self._group.rank if is_same_size else 0) or {}
        if lacking:
            self._report_lacking(lacking, progress)
        self._position.restore(
            progress,
            part.get(_FACTS, ()),
            part.get(RNG),
            other_data,
            source=str(found.path),
            stream_state=part.get(_STREAM),
        )
        self._resumed = self._describe_resume(found, progress)
        return True

    def report_resumed(self) -> None:
        """Report the position that the run resumes from, once training or an evaluation begins. Not collective."""
        if self._resumed:
            self._report(self._resumed)
            self._resumed = ""

    def report_if_finished(self, num_epochs: int | None, max_updates: int | None) -> None:
        """Report instead that the run is finished, if it has made all of its epochs or updates. Not collective."""
        made = {"epochs": (self._position.epoch, num_epochs), "updates": (self._position.num_updates, max_updates)}
        for unit, (num, total) in made.items():
            if self._resumed and total is not None and num >= total:
                self._resumed = ""
                self._report(
                    f"the run in {self._require('resuming').folder.where} is finished: it has made {num} {unit} of "
                    f"{total}. Pass a larger number of {unit} to train longer, or start over with `resume=False`."
                )

    def report_nothing_left(self) -> None:
        """Report that a resumed stream ends at or before the position to resume from."""
        self._report(
            f"nothing was left of epoch {self._position.epoch}, which resumes at batch {self._position.next_batch}: "
            "the stream ends before that batch. If it was longer in the saved run, it is a different stream now."
        )

    def request(self, metrics: Mapping[str, float] | None, *, in_batch: bool) -> None:
        """Implement `Loop.save`. Collective outside of epochs and batches."""
        self._require("saving")
        self._saves_by = "user"
        self._metrics = {name: float(value) for name, value in (metrics or {}).items()}
        if self._best is not None and metrics is not None and self._best.name not in self._metrics:
            found = f"`best` is '{self._best}', and the metrics are {', '.join(map(repr, metrics)) or 'empty'}"
            raise self._error("saving", found, "Pass the metric under the name in `best`.")
        self._is_requested = True
        if not in_batch and not self.is_in_epochs:
            self._save(self._position.next_batch)
            self.wait()

    def after_update(self, next_batch: int, *, leaves: bool, may_save: bool = True) -> None:
        """Save if it is due, and always if all ranks stop: `leaves`, or a reason that comes with the save. Collective.

        `may_save`: False postpones a save that is due to a later update.

        Raises SystemExit(75) on all ranks if they stop because of SIGTERM or SIGUSR1, once the checkpoint is on disk.
        """
        if self._checkpoints is None:
            return
        self._num_updates += 1
        if self._num_updates == 1:  # the optimizer has its state from now on
            num_bytes = self._measure()
            if self._group.is_rank_zero:
                self._checkpoints.folder.reserve(num_bytes)
        self._is_postponed |= self._is_due(self._checkpoints)
        if (self._is_postponed and may_save) or leaves:
            self._save(next_batch)
            leaves = leaves or bool(self._flags.reasons)  # which the check before the save may have exchanged
        if leaves:
            self.leave()

    def note_trained(self) -> None:
        """After the first update, warn if it was outside of `Loop.epochs` and a checkpoint was not resumed."""
        if self._saves_by != "nothing":
            return
        self._saves_by = "user" if self.is_in_epochs else "unsaved epoch"
        has_latest = self._checkpoints is not None and (self._checkpoints.folder.path / "latest").exists()
        if not self.is_in_epochs and self._group.is_rank_zero and has_latest:
            self.note_next_epoch()

    def note_next_epoch(self) -> None:
        """Warn, at the second epoch outside of `Loop.epochs`, if the program has not saved the first one."""
        if self._saves_by == "unsaved epoch":
            self._saves_by = "user"
            warn_unsaved(self._group)

    def end_epoch(self, *, is_last: bool) -> None:
        """Advance to the next epoch and save, if it is due. Collective."""
        self._position.end_epoch()
        if self._checkpoints is None:
            return
        every, epoch = self._interval, self._position.epoch
        is_due = every is None or (not every.counts_updates and every.is_due(epoch - 1, epoch))
        if not (is_due or is_last or self._is_requested):
            self._is_skipped = True
            return
        if self._best is not None and self._best.name not in self._metrics:
            name = self._best.name
            self._report_once(
                f"no best checkpoint was chosen: `best` is '{self._best}', and this epoch has no metric {name!r}. Pass "
                f"it within the epoch: loop.save({{{name!r}: ...}})."
            )
        self._save(0)

    def save_skipped(self) -> None:
        """Save if the last epoch ended without a save. Collective then."""
        if self._is_skipped:
            self._save(0)

    def leave(self) -> None:
        """Wait for the last save when all ranks stop.

        Raises SystemExit(75) if a signal requested the stop. Collective.
        """
        if self._checkpoints is None:
            return
        is_written = self._checkpoints.wait_uploaded()
        reasons = self._flags.reasons
        names = [reason for reason in reasons if reason in _REQUEUE]
        if names:
            self._exit(names[0], is_written)
        reported = next((_REASONS[reason] for reason in reasons if reason in _REASONS), None)
        if self._is_unreported and reported is not None:
            then = ". The same lines resume there." if is_written else "."
            self._report(f"{reported}: {_describe_save(self._checkpoints, is_written)}{then}")
        self._is_unreported = False

    def wait(self) -> bool:
        """Wait for the last save. True if it is on disk, the same on all ranks. Collective."""
        return self._checkpoints is None or self._checkpoints.wait()

    def release(self) -> None:
        """Wait for pending writes, and let other processes write to the directory. Not collective."""
        if self._checkpoints is not None and self._group.is_rank_zero:
            self._checkpoints.folder.close()

    @contextmanager
    def in_epochs(self) -> Iterator[None]:
        """Context of `Loop.epochs`. Not collective: one rank may leave it alone, with an exception."""
        self.is_in_epochs, message = True, _LEFT_BY_BREAK
        try:
            yield
            self.report_resumed()
            message = _SAVED_BEFORE
        finally:
            self.is_in_epochs = False
            if self._is_requested:
                self._is_requested = False
                self._report(message)
            self.release()

    def _match(self, found: Checkpoint) -> Callable[[], list[str]]:
        saved, position = found.manifest.progress, self._position
        before = {"seed": saved.seed, "accumulate": saved.accumulate if saved.batch else None}
        now = {"seed": position.seed, "accumulate": position.accumulation}
        check_unchanged(before, now, saved.step, saved.batch, str(found.path))
        return self._tracked.match(found, self._group)

    def _is_due(self, checkpoints: CollectiveCheckpoints) -> bool:
        every, every_s = self._options.save_every_updates, self._options.save_every_s
        is_due = self._flags.take_save() or self._is_requested
        is_due |= every is not None and self._num_updates - self._num_updates_saved >= every
        if self._interval is not None and self._interval.counts_updates:
            is_due |= self._interval.is_due(max(self._step_saved, self.first_update), self._position.num_updates)
        if self._group.is_rank_zero:
            checkpoints.folder.poll()
            if not is_due and every_s is not None and time.monotonic() - self._saved_s >= every_s:
                self._flags.request_save()
        return is_due

    def _save(self, next_batch: int) -> None:
        began_s = time.perf_counter()
        checkpoints = self._require("saving")
        self._check()
        weights, state, shards = self._collect()
        own = state.pop(OWN)
        checkpoints.save(
            self._position.progress(next_batch),
            weights=weights,
            state=state,
            part={_FACTS: self._position.facts, OWN: own, **self._stream_state(next_batch)},
            metrics=self._metrics,
            shards=shards,
        )
        self._is_requested, self._is_unreported, self._metrics = False, True, {}
        self._is_postponed = False
        self._num_updates_saved, self._step_saved = self._num_updates, self._position.num_updates
        self._is_skipped = False
        self._saved_s = time.monotonic()
        self.held_up_s += time.perf_counter() - began_s

    def _stream_state(self, next_batch: int) -> dict[str, Any]:
        """Return the state with which the current stream resumes there; {} if there is none or it cannot be saved."""
        state = self._position.stream_state(next_batch)
        if state is None:
            return {}
        if can_hold(state):
            return {_STREAM: state}
        self._report_once(_STREAM_NOT_SAVED)
        return {}

    def _report_lacking(self, lacking: Sequence[str], saved: RunProgress) -> None:
        now, before = self._group.world_size, saved.world_size
        why = f"the checkpoint is of {before} ranks, this run has {now}" if now != before else "none was saved"
        self._report(f"each rank's own state is not resumed, as {why}: {', '.join(lacking)}")

    def _measure(self) -> int:
        self._is_measured = True
        weights, state, _ = self._collect()
        return on_all_ranks(self._group, lambda: measure({"weights": weights, "state": state}))

    def _collect(self) -> tuple[Weights, dict[str, Any], Shards]:
        """Return the state to save. An error on one rank, e.g. in a `state_dict()`, is raised on all. Collective."""
        divided = self._tracked.has_shards and self._require("saving").can_share()
        return on_all_ranks(self._group, lambda: self._tracked.collect(self._group, divided=divided))

    def _describe_resume(self, found: Checkpoint, saved: RunProgress) -> str:
        """Return the resume message: position, and settings that changed."""
        world_size, accumulation = self._group.world_size, self._position.accumulation
        batch = f", batch {saved.batch}" if saved.batch else ""
        counts = " (`loop.batch.index` counts from there; enumerate() begins at 0)" if saved.batch else ""
        sizes = f", on {world_size} rank{'s' * (world_size > 1)}"
        if saved.world_size != world_size:
            sizes += f" instead of {saved.world_size}"
        if accumulation is not None and saved.accumulate not in (None, accumulation):
            sizes += f", with accumulate={accumulation} instead of {saved.accumulate}"
        where = f"{self._require('resuming').folder.where}/{found.path.name}"
        return f"resuming from {where}: epoch {saved.epoch}{batch}, after {saved.step} updates{sizes}{counts}"

    def _exit(self, name: str, is_written: bool) -> NoReturn:
        save = _describe_save(self._require("leaving"), is_written)
        self._report(
            f"{name}: {save}; leaving epoch {self._position.epoch} with exit code {EXIT_REQUEUE}. The same command "
            "resumes there."
        )
        raise SystemExit(EXIT_REQUEUE)

    def _report(self, text: str) -> None:
        if self._group.is_rank_zero:
            write_stderr(text)

    def _require(self, did: str) -> CollectiveCheckpoints:
        if self._checkpoints is None:
            raise self._error(did, "this loop has no `checkpoint_dir`", "Pass `checkpoint_dir=` to Loop.")
        return self._checkpoints

    def _error(self, did: str, found: str, fix: str) -> LoopError:
        return LoopError(did, found=found, fix=fix, rank=self._group.rank)


def _describe_save(checkpoints: CollectiveCheckpoints, is_written: bool) -> str:
    folder = checkpoints.folder.where
    return f"the checkpoint in {folder} is written" if is_written else "the last checkpoint could not be written"


_SAVED_BEFORE = (
    "loop.save() ignored: this epoch was stopped early and already has a checkpoint, from which training resumes "
    "within the epoch."
)
_LEFT_BY_BREAK = (
    "a checkpoint requested by loop.save() was not made: the epoch was left before its end. To end training early, "
    "call loop.stop() instead of `break`."
)
_STREAM_NOT_SAVED = (
    "the state of the dataset's state_dict() cannot be saved: a resumed run reads the stream from its start and skips "
    "up to its position. Return numbers, strings, tensors, and dicts, lists and tuples of them."
)
