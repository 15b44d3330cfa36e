# SPDX-License-Identifier: Apache-2.0
"""`CheckpointDir`: the checkpoints of a run, written by one process in the background; newest and best are kept."""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ddpilot.checkpoint.atomic_files import TOKEN, call_in_background, move_aside, probe, remove_stale, replace_text
from ddpilot.checkpoint.format import (
    BEST,
    CHECKPOINT_NAME,
    LATEST,
    STAGING_PREFIX,
    Checkpoint,
    Contents,
    StagedSave,
    checkpoint_number,
    local_names,
    read_checkpoint,
    read_pointer,
    write_checkpoint,
)
from ddpilot.checkpoint.host_copy import HostCopy
from ddpilot.checkpoint.manifest import Monitor, RunProgress
from ddpilot.checkpoint.remote.checkpoints import RemoteCheckpoints
from ddpilot.checkpoint.remote.store import at_exit, clean_url, is_url, staging_folder
from ddpilot.checkpoint.safetensors_file import MAX_FILE_BYTES, plain_tensors
from ddpilot.checkpoint.write_lock import Writer, lock_for_writing
from ddpilot.errors import CheckpointError, CorruptCheckpointError
from ddpilot.group.device import is_out_of_memory


def write_stderr(text: str) -> None:
    """Write `text` to stderr, with the prefix "ddpilot: "."""
    sys.stderr.write(f"ddpilot: {text}\n")


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DELETING_PREFIX = ".deleting-"
_STALE = re.compile(
    rf"{re.escape(STAGING_PREFIX)}{CHECKPOINT_NAME.pattern}-{TOKEN}|"
    rf"{re.escape(_DELETING_PREFIX)}{CHECKPOINT_NAME.pattern}"
)
"""Names of directories that a killed process was writing or deleting."""


class CheckpointDir:
    """The checkpoints of one run, in the directory `path`. One process writes; any process reads.

    - `path`: a local directory, or an fsspec URL, such as "s3://bucket/run7".
    - `keep`: number of newest checkpoints to keep, 3 by default, at least 1; None keeps all.
    - `best`: "max acc" or "min loss": the best checkpoint by that metric is kept as well.
    - `max_file_bytes`: the weights of a model with more bytes, 5 GB by default, are split into several safetensors
      files with an index, as Hugging Face's libraries do.
    - `staging_dir`: with a URL, the local directory below which checkpoints are written first. None: the environment
      variable DDPILOT_STAGING_DIR, else ~/.cache/ddpilot/checkpoints.
    - `report`: called with every message for the user, on the thread that called the method; stderr by default.

    With a URL, checkpoints are uploaded in the background. `names`, `open`, `latest` and `best` find the checkpoints
    that are complete at the URL, and download files that are not in the local directory. `close` waits for the uploads;
    `save` waits while two are not finished.

    A save that fails because of the disk (no space, no permission, an I/O error) is reported and does not stop
    training: the last good checkpoint is kept. As a context manager, it waits for pending writes on exit.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        best: str | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        staging_dir: str | os.PathLike[str] | None = None,
        report: Callable[[str], None] = write_stderr,
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keeping checkpoints in {path}", found=f"`keep` is {keep}", fix="Keep at least 1.")
        if max_file_bytes < 1:
            found = f"`max_file_bytes` is {max_file_bytes}"
            raise CheckpointError(f"keeping checkpoints in {path}", found=found, fix="Pass a number of bytes above 0.")
        self._remote: RemoteCheckpoints | None = None
        if is_url(path):
            url = clean_url(str(path))
            self.path = staging_folder(url, staging_dir)
            self._remote = RemoteCheckpoints(url, self.path, keep, report)
            self._is_closed_at_exit = False
        elif staging_dir is not None:
            found = f"`staging_dir` is {os.fspath(staging_dir)!r}, and {path} is not a URL, so nothing is uploaded"
            raise CheckpointError(f"keeping checkpoints in {path}", found=found, fix="Leave `staging_dir` out.")
        else:
            self.path = Path(path).expanduser()
        self._keep = keep
        self._max_file_bytes = max_file_bytes
        self._monitor = None if best is None else Monitor.parse(best)
        self.report = report
        self._host_copy = HostCopy()
        self._future: Future[None] | None = None
        self._notes: list[str] = []
        self._is_saved = True  # the last save succeeded, or there was none
        self._writer: Writer | None = None

    def __repr__(self) -> str:
        return f"CheckpointDir({self.where!r}, keep={self._keep})"

    @property
    def where(self) -> str:
        """The URL, or the local directory, for messages."""
        return str(self.path) if self._remote is None else self._remote.url

    def check_writable(self) -> None:
        """Create the directory, write a test file in it and lock it for this process, before training starts.

        Raises CheckpointError if that fails, if a different live process writes checkpoints there, and if `latest` or
        `best` is a file of a different program. A damaged `latest` or `best` next to checkpoints is renamed and
        reported.
        """
        try:
            probe(self.path)
        except OSError as error:
            raise CheckpointError(
                f"writing in {self.path}",
                found=f"{error.strerror} ({type(error).__name__})",
                fix="Training has not started. Choose a `checkpoint_dir` that this user may write to.",
            ) from error
        self.claim()
        for pointer in (LATEST, BEST):
            if self._is_ours(pointer):
                continue
            if not local_names(self.path):
                raise CheckpointError(
                    f"preparing to save in {self.path}",
                    found=f"there is a `{pointer}` of a different program, which the next checkpoint would replace",
                    fix="Training has not started. Choose a different `checkpoint_dir`, or remove that file.",
                )
            renamed = self._rename_damaged(pointer)
            self.report(
                f"`{pointer}` in {self.path} is damaged (it does not name a checkpoint) and was renamed to "
                f"{renamed.name}; the checkpoints next to it are used without it"
            )
        if self._remote is not None:
            self._remote.check_writable()

    def claim(self) -> None:
        """Lock the directory for writing by this process, until `close`. Does nothing if this process has locked it.

        Raises CheckpointError if a different live process holds the lock, and if the lock file is not a regular file.
        Processes on other machines are seen only if the file system shares locks. If the directory was deleted since,
        this is reported and it is created again.
        """
        if self._remote is not None and not self._is_closed_at_exit:
            self._is_closed_at_exit = True
            at_exit(functools.partial(_close, weakref.ref(self), self._remote))
        if self._writer is not None:
            if self._writer.is_of(self.path):
                return
            self._writer = None
            self._restore()
        if self.path.is_dir():
            self._writer = lock_for_writing(
                self.path, self.report, has_checkpoints=lambda: bool(local_names(self.path))
            )

    def set_aside(self) -> Path | str | None:
        """Move all checkpoints to a new subdirectory and return its path; None if there are none.

        A new run then neither resumes the checkpoints of an earlier one nor deletes them. At a URL they stay where they
        are, and a file there lists them: its URL is returned. Raises OSError if a move fails.
        """
        listed = None if self._remote is None else self._remote.set_aside()
        names = local_names(self.path)
        # Oldest first: after a crash, the newest remains, which `latest` names until it is moved too.
        moved = move_aside(self.path, [*reversed(names), BEST, LATEST]) if names else None
        return listed or moved

    def reserve(self, num_bytes: int) -> None:
        """Preallocate memory for a copy of `num_bytes`, in the background, so that the first save is fast, too."""
        self.wait()
        self._future = call_in_background(lambda: self._reserve(num_bytes))

    def save(
        self,
        progress: RunProgress,
        *,
        weights: Mapping[str, Mapping[str, torch.Tensor]],
        state: Mapping[str, Any] | None = None,
        parts: Sequence[Mapping[str, Any]] = (),
        metrics: Mapping[str, float] | None = None,
        staged: StagedSave | None = None,
    ) -> None:
        """Copy the state to CPU memory and write the copy in the background; waits for an earlier save first.

        - `progress`: the position of the run.
        - `weights`: state dicts by model name, `{"model": model.state_dict()}`, also of wrapped models.
        - `state`: further state dicts by name, equal on all ranks.
        - `parts`: the state of each rank, one for each rank of `progress.world_size`, or none.
        - `metrics`: numbers to choose the best by.
        - `staged`: the result of `stage`, if other ranks write, too.

        The checkpoint becomes `latest` once it is completely on disk. Raises CheckpointError for values of an
        unsupported type, and if a different process writes here.
        """
        if staged is None:
            self._prepare_to_save()
        try:
            if len(parts) not in (0, progress.world_size):
                raise CheckpointError(
                    f"saving step {progress.step}",
                    found=f"{len(parts)} parts for {progress.world_size} ranks",
                    fix="Pass the part of every rank, in rank order.",
                )
            plain = {name: plain_tensors(name, tensors) for name, tensors in weights.items()}
            copied = self._host_copy.take({"weights": plain, "state": dict(state or {}), "parts": list(parts)})
        except BaseException as error:
            if staged is not None:
                staged.remove()
            if not (isinstance(error, OSError) or is_out_of_memory(error)):
                raise
            self.note_failure(error if isinstance(error, OSError) else as_os_error(error))
            return
        contents = Contents(progress=progress, metrics={n: float(v) for n, v in (metrics or {}).items()}, **copied)
        self._future = call_in_background(lambda: self._write(contents, staged))

    def stage(self, progress: RunProgress) -> StagedSave | None:
        """Create a directory in which all ranks write their shards, for `save`; None if that failed, which is reported.

        Waits for an earlier save first.
        """
        self._prepare_to_save()
        try:
            return StagedSave(self.path, self._next_name(progress.step))
        except OSError as error:
            self.note_failure(error)
            return None

    def note_failure(self, error: OSError) -> None:
        """Report that a save has failed."""
        self._is_saved = False
        self._report_failure(error)

    def _prepare_to_save(self) -> None:
        self.wait()
        self.claim()
        if self._remote is not None:
            self._remote.uploads.wait_for_room()

    def wait(self) -> bool:
        """Wait for pending writes and report failures. True if the last save is on disk; it may not be uploaded yet.

        Raises CheckpointError from the writer's exception if it is not an OSError.
        """
        failure = None if self._future is None else self._future.exception()
        if self._future is not None:
            self._is_saved, self._future = failure is None, None
        if isinstance(failure, OSError):
            self._report_failure(failure)
        elif failure is not None:
            raise CheckpointError("saving a checkpoint", found=f"{type(failure).__name__}: {failure}") from failure
        while self._notes:
            self.report(self._notes.pop(0))
        if self._remote is not None:
            self._remote.uploads.poll()
        return self._is_saved

    def wait_uploaded(self) -> bool:
        """Wait for pending writes and uploads and report failures. True if the last save is on disk and uploaded."""
        is_saved = self.wait()
        return is_saved and (self._remote is None or self._remote.uploads.drain())

    def poll(self) -> None:
        """Report failures so far, without waiting: cheap enough for every step."""
        if self._future is not None and self._future.done():
            self.wait()
        elif self._remote is not None:
            self._remote.uploads.poll()

    def close(self) -> bool:
        """Call `wait_uploaded` and release the lock; `save` locks it again."""
        try:
            is_saved = self.wait()
            return (self._remote is None or self._remote.close()) and is_saved
        finally:
            self._writer = None

    def names(self) -> list[str]:
        """Return the names of all finished checkpoints, newest first. Their contents are not verified."""
        return local_names(self.path) if self._remote is None else self._remote.names()

    def open(self, name: str, *, verify: bool = True) -> Checkpoint:
        """Return the checkpoint called `name`. Raises CorruptCheckpointError; `verify=False` compares sizes only."""
        if self._remote is not None:
            return self._remote.fetch(name, verify=verify)
        return read_checkpoint(self.path / name, verify=verify)

    def open_same(self, chosen: Checkpoint) -> Checkpoint:
        """Return the checkpoint that a different rank has opened, with files that this rank can read.

        If the ranks share a URL but no directory, the files are downloaded. Raises CorruptCheckpointError.
        """
        name = chosen.path.name
        if self._remote is not None:
            return self._remote.fetch(name, verify=False, checksum=chosen.manifest.checksum)
        return self.open(name, verify=False)

    def latest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, from `latest` backwards; None if there are no checkpoints.

        Reports each checkpoint that was skipped, and why. Raises CorruptCheckpointError if none is intact, and
        CheckpointError if the directory cannot be read.
        """
        try:
            pointed, candidates = self._candidates()
        except OSError as error:
            raise CheckpointError(
                f"searching for a checkpoint in {self.path}",
                found=str(error),
                fix="Let this user read the directory, or choose a different `checkpoint_dir`.",
            ) from error
        if pointed in candidates:
            candidates = candidates[candidates.index(pointed) :]
        elif pointed is not None:
            self.report(f"`latest` in {self.path} names {pointed!r}, which does not exist")
        wrong: list[CorruptCheckpointError] = []
        for name in candidates:
            try:
                checkpoint = self.open(name)
            except CorruptCheckpointError as error:
                wrong.append(error)
                continue
            for skipped in wrong:
                self.report(f"{skipped}. It was skipped; the checkpoint before it is used: {name}")
            return checkpoint
        if wrong or pointed is not None:
            raise CorruptCheckpointError(
                f"searching for a checkpoint in {self.where}",
                found="; ".join(error.render() for error in wrong) or "the checkpoint in `latest` does not exist",
                fix="Restore one from a copy, or start over in an empty directory.",
            )
        return None

    def best(self) -> Checkpoint | None:
        """Return the best checkpoint by the metric, verified; None if there is none. Raises CorruptCheckpointError."""
        name = read_pointer(self.path, BEST) if self._remote is None else self._remote.best()
        return None if name is None else self.open(name)

    def _candidates(self) -> tuple[str | None, list[str]]:
        """Return the name in `latest` and all names, newest first; at a URL, the newest one is the latest."""
        if self._remote is None:
            return read_pointer(self.path, LATEST), self.names()
        self._remote.finish_interrupted()
        return None, self.names()

    def __enter__(self) -> CheckpointDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reserve(self, num_bytes: int) -> None:
        try:
            self._host_copy.reserve(num_bytes)
        except (OSError, MemoryError) as error:
            self._notes.append(f"no memory for the copies of checkpoints, {num_bytes / 1e6:.1f} MB: {error}")

    def _next_name(self, step: int) -> str:
        """Return the name of the next checkpoint, after `step` updates, and delete what a killed process has left."""
        self.path.mkdir(parents=True, exist_ok=True)
        remove_stale(self.path, _STALE)
        names = local_names(self.path)
        number = 1 + max(map(checkpoint_number, names), default=0)
        if self._remote is not None:
            number = max(number, self._remote.last_number + 1)
        return f"save-{number:06}-step-{step}"

    def _write(self, contents: Contents, staged: StagedSave | None) -> None:
        name = self._next_name(contents.progress.step) if staged is None else staged.name
        written = write_checkpoint(self.path, name, contents, self._max_file_bytes, staged)
        try:
            replace_text(self.path / LATEST, f"{name}\n")
        except OSError:
            shutil.rmtree(written, ignore_errors=True)
            raise
        self._point_at_best(name, contents.metrics)
        if self._remote is not None:
            self._remote.uploads.add(name)
        self._prune()

    def _point_at_best(self, name: str, metrics: Mapping[str, float]) -> None:
        monitor = self._monitor
        if monitor is None or monitor.name not in metrics:
            return
        if not monitor.is_better(metrics[monitor.name], self._best_so_far().get(monitor.name)):
            return
        try:
            replace_text(self.path / BEST, f"{name}\n")
            if self._remote is not None:
                self._remote.note_best(name, metrics)
        except OSError as error:  # the checkpoint itself was written
            self._notes.append(f"{name} in {self.path} is the best so far, but `{BEST}` cannot name it: {error}")

    def _best_so_far(self) -> Mapping[str, float]:
        if self._remote is not None:
            return self._remote.best_metrics
        name = read_pointer(self.path, BEST)
        if name is None:
            return {}
        try:
            return self.open(name, verify=False).manifest.metrics
        except CorruptCheckpointError as error:
            self._notes.append(f"{error}. The best checkpoint is chosen again")
            return {}

    def _prune(self) -> None:
        if self._keep is None:
            return
        spared = {read_pointer(self.path, LATEST), read_pointer(self.path, BEST)}
        if self._remote is not None:
            spared |= set(self._remote.uploads.queued)
        for name in local_names(self.path)[self._keep :]:
            if name in spared:
                continue
            if self._remote is not None:
                self._remote.uploads.forget(name)
            try:
                # A crash while deleting must not leave a directory that looks like a damaged checkpoint.
                shutil.rmtree((self.path / name).rename(self.path / f"{_DELETING_PREFIX}{name}"))
            except FileNotFoundError:  # deleted by a different process
                continue
            except OSError as error:
                self._notes.append(f"deleting the old checkpoint {name} in {self.path}: {error}. Delete it yourself")

    def _restore(self) -> None:
        """Report that the lock file or its directory was deleted, and create the directory again."""
        num = len(local_names(self.path))
        what = f"the file `.writer` in {self.path}" if num else f"{self.path}, or everything in it,"
        left = f"{num} checkpoint{'s are' if num > 1 else ' is'} left" if num else "no checkpoint is left"
        self.report(f"{what} was deleted or moved while this job saves there: {left}. Training and saving continue")
        with suppress(OSError):  # otherwise the save reports the error
            self.path.mkdir(parents=True, exist_ok=True)

    def _is_ours(self, pointer: str) -> bool:
        path = self.path / pointer
        if not path.is_file():
            return not path.exists()
        return CHECKPOINT_NAME.fullmatch(read_pointer(self.path, pointer) or "") is not None

    def _rename_damaged(self, pointer: str) -> Path:
        number = 1
        while (renamed := self.path / f"{pointer}-damaged-{number}").exists():
            number += 1
        return (self.path / pointer).rename(renamed)

    def _report_failure(self, failure: OSError) -> None:
        try:
            last = read_pointer(self.path, LATEST)
        except OSError as error:
            last = f"`{LATEST}` cannot be read now ({error})"
        self.report(render_failure(self.path, failure, last))


def _close(reference: weakref.ref[CheckpointDir], remote: RemoteCheckpoints) -> None:
    """Finish uploads of a directory that was not closed, also if it is garbage by now."""
    directory = reference()
    if remote.is_open:
        remote.close() if directory is None else directory.close()


def as_os_error(error: BaseException) -> OSError:
    """Convert torch's out-of-memory errors, also for pinned memory, to an OSError with ENOMEM."""
    text = next(iter(str(error).splitlines()), type(error).__name__)
    return OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)} ({text})")


def render_failure(folder: Path, failure: OSError, last: str | None) -> str:
    """Return the message for a save in `folder` that failed; `last`: the name of the last good checkpoint, if any."""
    kept = f"the last good checkpoint is {last}" if last else "there is no earlier one"
    if failure.errno == errno.ENOMEM:
        return f"no checkpoint was written in {folder}: no memory for its copy ({failure}). Training continues; {kept}."
    text = f"no checkpoint was written in {folder}: {failure}. Training continues; {kept}. {_free(folder)}"
    if failure.errno in _NO_SPACE:
        return f"{text} Free some space, or keep fewer checkpoints (`keep`)."
    return f"{text} Check the directory and its file system."


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB are free there."
    except OSError as error:
        return f"The free space is unknown ({error.strerror})."
