# SPDX-License-Identifier: Apache-2.0
"""`Passes`: epochs, and in each one or more passes over the batches of a loader, up to its end or a stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddpilot.data.nested import to_device
from ddpilot.data.options import naming_rank
from ddpilot.errors import LoopError
from ddpilot.training.batch_groups import CurrentBatch, Loader, check_loader, is_at_end, iterate_groups
from ddpilot.training.checks.buffers import check_batch_norms
from ddpilot.training.engine.parts import LoopParts
from ddpilot.training.notices import empty_epoch_error, locating, no_samples_error, no_updates_error, user_line
from ddpilot.training.options import check_goal
from ddpilot.training.resume.data_position import describe_data


@locating
class Passes:
    """Implements `Loop.epochs` and `Loop.batches`."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        self.group = parts.group
        self._updates = parts.updates
        self._position = parts.position
        self._checkpointer = parts.checkpointer
        self._flags = parts.flags
        self._local = parts.local
        self._averages = parts.averages
        self._num_epochs: int | None = None
        self._max_updates: int | None = None
        self._open: object | None = None
        """Stands for the pass that is open; None between passes."""

    def epochs(self, num: int | None, max_updates: int | None) -> Iterator[int]:
        """Implement `Loop.epochs`. Collective."""
        check_goal(num, max_updates)
        self._position.begin_epochs()
        self._checkpointer.begin()
        self._averages.count_from(self._position.num_updates)
        self._flags.start()
        self._num_epochs, self._max_updates = num, max_updates
        try:
            with self._parts.signals, self._checkpointer.in_epochs(), self._parts.log.closing():
                self._checkpointer.report_if_finished(num, max_updates)
                yield from self._yield_epochs(num)
                self._parts.log.finish()
        finally:
            self._max_updates = None

    def _yield_epochs(self, num: int | None) -> Iterator[int]:
        position = self._position
        while not self._has_all_updates() and (num is None or position.epoch < num):
            self._parts.join()
            self._updates.exchange_between_epochs()
            if self._flags.reasons:
                self._checkpointer.save_skipped()
                self._checkpointer.leave()
                return
            position.begin_epoch()
            before = (-1, -1) if position.next_batch else (position.samples_seen, self._updates.num_steps)
            yield position.epoch
            if position.next_batch:  # stopped within the epoch and saved there: a later run resumes it
                return
            if num is None and not self._flags.reasons:
                if position.samples_seen == before[0]:
                    raise empty_epoch_error(position.epoch, self._max_updates)
                if self._updates.num_steps == before[1]:
                    raise no_updates_error(position.epoch, self._max_updates)
            is_last = self._has_all_updates() or (num is not None and position.epoch + 1 >= num)
            self._checkpointer.end_epoch(is_last=is_last)
        self._parts.join()
        self._checkpointer.wait()

    def _has_all_updates(self) -> bool:
        """True if the `max_updates` of `epochs` have been made."""
        return self._max_updates is not None and self._position.num_updates >= self._max_updates

    def batches(self, loader: Loader) -> Iterator[Any]:
        """Implement `Loop.batches`, for one loader. Collective."""
        if not self._begin(loader):
            return
        groups = self._read(loader)
        position, progress, device = self._position, self._parts.progress, self.group.device
        updates = None if self._max_updates is None else (position.num_updates, self._max_updates)
        shown = progress.epoch(position.epoch, self._num_epochs, position.next_batch, loader, updates)
        self._parts.log.begin_pass()
        this = self._open = object()
        try:
            with self._parts.signals, shown:
                for batch in groups:
                    self._updates.enter(batch)
                    if batch.data is None:
                        raise no_samples_error(batch)
                    try:
                        yield to_device(batch.data, device)
                    except GeneratorExit:
                        self._leave(batch, this)
                        raise
                    if self._open is not this:
                        self._check_open(this)
                    progress.advance(is_update=batch.is_last)
                    if batch.has_empty_rank:
                        self._updates.share_buffers()
                    if batch.is_last and self._end_update(batch, loader):
                        break
                else:
                    self._end(loader)
                self._updates.leave()
        finally:
            if self._open is this:
                self._open = None

    def _read(self, loader: Loader) -> Iterator[CurrentBatch]:
        """Return the batches of `loader` from the position on, and measure how long each takes."""
        parts, position = self._parts, self._position
        return parts.data_clock.over(
            iterate_groups(
                loader,
                self.group,
                epoch=position.epoch,
                first_batch=position.next_batch,
                accumulation=parts.accumulation.constant or parts.next_group_size,
                stream_state=position.stream_state(position.next_batch),
            )
        )

    def _begin(self, loader: Loader) -> bool:
        """Begin a pass over `loader`. False if the epoch has no more of it."""
        check_loader(loader)
        if self._has_all_updates() or (self._flags.reasons and self._position.next_batch):
            return False  # an earlier pass of this epoch made the last update, or stopped where the epoch resumes
        if not self._checkpointer.is_in_epochs:
            is_next = self._position.is_next_epoch(loader)
            if is_next and self._flags.reasons:
                return False
            if is_next:
                self._checkpointer.note_next_epoch()
                self._position.begin_epoch_outside()
        self._parts.join()
        self._parts.lone_break.begin_pass()
        self._updates.share_buffers()
        self._parts.unprepared.begin_pass()
        found = check_batch_norms(self._parts.prepared, loader)
        with naming_rank(self.group.rank):
            is_open = self._position.begin_pass(loader, self.group.device)
        self._parts.report_findings(found)
        if is_open:
            self._averages.count_from(self._position.num_updates)
            self._flags.start()
            self._checkpointer.report_resumed()
        return is_open

    def _end_update(self, batch: CurrentBatch, loader: Loader) -> bool:
        """Finish an accumulation group after its last batch. True if the pass ends here, before its end.

        Collective if an exchange, comparison, average or checkpoint is due.
        """
        parts, position = self._parts, self._position
        is_end = is_at_end(loader, batch)
        leaves = self._max_updates is not None and self._has_all_updates() and not is_end
        self._updates.complete()
        if self._averages.pairs:
            self._averages.after_update(position.num_updates, position.epoch)
        if parts.precision.scaler is not None:
            parts.precision.settle()
        position.samples_seen += batch.group_count
        position.note_stream(batch.index + 1, batch.stream_state)
        if parts.buffers.is_waiting and self._updates.has_backward:
            parts.report_findings(parts.buffers.after_update())
        if self._updates.has_backward:
            self._checkpointer.note_trained()
        self._local.after_update(ends=leaves or is_end)
        parts.log.end_update(ends=leaves)
        stops = leaves or (bool(self._flags.reasons) and self._local.is_equal)
        self._checkpointer.after_update(batch.index + 1, leaves=stops, may_save=self._local.is_equal)
        if leaves or (self._flags.reasons and not is_end and self._local.is_equal):
            self._updates.check_pending()
            position.next_batch = batch.index + 1
            return True
        return False

    def _end(self, loader: Loader) -> None:
        """End a pass that read all batches."""
        parts, position = self._parts, self._position
        parts.before_read()
        parts.log.end_update(ends=True)
        is_empty = position.next_batch and self._updates.batch is None
        if is_empty and "dataset_length" not in describe_data(loader):
            self._checkpointer.report_nothing_left()
        if position.is_first_pass:
            self._averages.after_epoch(position.num_updates, position.epoch + 1)
        position.end_pass()
        parts.report_findings(parts.buffers.end_pass())

    def _leave(self, batch: CurrentBatch, this: object) -> None:
        """Handle a loop over `batches` that ended by `break` or an exception, or whose generator was closed."""
        if self._open is this:
            self._averages.after_update(self._position.num_updates, self._position.epoch)
            self._position.end_pass()
            self._parts.lone_break.note(batch, user_line(), drops=self._updates.drop_unfinished())

    def _check_open(self, this: object) -> None:
        """Raise LoopError if a second pass over `batches` began after `this` one and is still open."""
        if self._open is None:  # the second pass has ended, within a batch of this one
            self._open = this
            return
        raise LoopError(
            "reading the next batch",
            found="a second loop.batches() began before this one ended, so losses were weighted by its samples",
            fix="Iterate over both in one pass: `for x, y in loop.batches(a, b)`, with ends='longest' to repeat the "
            "shorter one.",
        )
