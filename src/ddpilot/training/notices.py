# SPDX-License-Identifier: Apache-2.0
"""Rank and batch in the errors of a loop, also in the file for a job script; warnings at the user's line."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar

from ddpilot.errors import DataError, DdpilotError, LoopError, RemoteRankError
from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.group.protocol import GroupLike
from ddpilot.launching.exception_report import is_victim
from ddpilot.launching.rank_environment import FAILURE_FILE_VARIABLE
from ddpilot.training.batch_groups import CurrentBatch
from ddpilot.training.options import detect_rank

_Class = TypeVar("_Class")

_PACKAGE = __name__.partition(".")[0]

Line = tuple[str, int]
"""File name and line number in the user's program."""


_NOWHERE: Line = ("ddpilot", 0)


def locating(cls: type[_Class]) -> type[_Class]:
    """Decorate `Loop`: errors that it raises name this rank, and the current batch if there is one."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and (not name.startswith("_") or name == "__init__"):
            setattr(cls, name, _located(method))
    return cls


def _located(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def located(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except (DataError, LoopError) as error:
            rank = self.group.rank if hasattr(self, "group") else detect_rank()
            locate(error, rank, getattr(self, "batch", None))
            raise

    @functools.wraps(method)
    def located_generator(self: Any, *args: Any, **options: Any) -> Any:
        try:
            yield from method(self, *args, **options)
        except (DataError, LoopError) as error:
            locate(error, self.group.rank, None)
            raise

    return located_generator if inspect.isgeneratorfunction(method) else located


def locate(error: DdpilotError, rank: int | None, batch: CurrentBatch | None) -> None:
    """Add the rank to `error`, and `batch` to a LoopError, unless they are named already."""
    if error.rank is None:
        error.rank = rank
    if isinstance(error, LoopError) and batch is not None and "batch " not in error.did + error.found:
        error.did += f" in batch {batch.index} of epoch {batch.epoch}"
    error.args = (error.render(),)


def warn_findings(findings: tuple[Finding, ...], group: GroupLike) -> None:
    """Warn of `findings` on rank 0, as text."""
    if findings and group.is_rank_zero:
        _warn(str(Findings(findings, more="`.findings` of the loop or trainer")), user_line())


def warn_dropped(line: Line, group: GroupLike) -> None:
    """Warn on rank 0 that the loop left an accumulation group at `line`, whose gradients were dropped."""
    if group.is_rank_zero:
        _warn(
            "a loop over batches() was left within an accumulation group: the gradients of that group were dropped, as "
            "they had not been all-reduced. Leave the loop when loop.is_update is True.",
            line,
        )


def warn_unsaved(group: GroupLike) -> None:
    """Warn on rank 0 that a loop with a `checkpoint_dir` trains without saving checkpoints."""
    if group.is_rank_zero:
        _warn(
            "this loop has a `checkpoint_dir`, but trains outside of loop.epochs(), so it does not save or resume "
            "automatically. Write `for epoch in loop.epochs(n):`; or call loop.resume() first, and loop.save() after "
            "each epoch.",
            user_line(),
        )


def user_line() -> Line:
    """Return the innermost line on the stack outside ddpilot; ("ddpilot", 0) if there is none."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    return _NOWHERE if _is_launcher(frame) else (frame.f_code.co_filename, frame.f_lineno)


def _is_launcher(frame: FrameType) -> bool:
    """True if `frame` belongs to the code that started this rank: the outermost frame when a `Trainer` launched it."""
    name = str(frame.f_globals.get("__name__")).partition(".")[0]
    return name in sys.stdlib_module_names or (name == "__main__" and frame.f_code.co_filename == "<string>")


def _warn(text: str, line: Line) -> None:
    if line == _NOWHERE:  # on ranks that a Trainer launched
        sys.stderr.write(f"ddpilot: {text}\n")
        return
    warnings.warn_explicit(text, UserWarning, *line)


def no_samples_error(batch: CurrentBatch) -> DataError:
    """Return the error of a rank whose part of a stream has no samples."""
    return DataError(
        f"beginning epoch {batch.epoch}",
        found="this rank's part of the stream is empty, so the structure of a batch is unknown",
        fix="Let the dataset yield samples in every part, or use fewer ranks or workers.",
    )


def empty_epoch_error(epoch: int, max_updates: int | None) -> LoopError:
    """Return the error of a training by updates whose data have no samples in an epoch."""
    return LoopError(
        f"training until `max_updates={max_updates}`",
        found=f"no samples were read in epoch {epoch}, so that number of updates would never be reached",
        fix="If the dataset is a stream, let `__iter__` begin again in each epoch: a generator or an open file that "
        "was read once is empty. Or give a number of epochs.",
    )


def no_updates_error(epoch: int, max_updates: int | None) -> LoopError:
    """Return the error of a training by updates that read an epoch without `Loop.step`."""
    return LoopError(
        f"training until `max_updates={max_updates}`",
        found=f"loop.step() was not called in epoch {epoch}, so that number of updates would never be reached",
        fix="Write loop.step(optimizer) instead of optimizer.step(), which the loop does not count. Or give a number "
        "of epochs.",
    )


_VICTIM_WAIT_S = 2.0
_MAX_CHARACTERS = 500
_ADDRESS = re.compile(r"0x[0-9a-f]{4,}")


def note_failures(num_updates: Callable[[], int]) -> None:
    """From now on, an exception that ends this process is noted in the file that `FAILURE_FILE_VARIABLE` names, if any.

    Only the first rank of the job that raises writes it. A rank that raises because of a different rank does not, and
    waits a moment before it exits, since srun then ends the rank that has the cause. `num_updates`: returns the
    number of updates made so far. Not collective.
    """
    path = os.environ.get(FAILURE_FILE_VARIABLE)
    if not path:
        return
    theirs, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == pid and (is_victim(error) or isinstance(error, RemoteRankError)):
            _await_note(path)
        elif os.getpid() == pid and not isinstance(error, KeyboardInterrupt):
            _write_once(path, render_failure(num_updates(), error))
        theirs(kind, error, trace)

    sys.excepthook = hook


def render_failure(num_updates: int, error: BaseException) -> str:
    """One line that is the same if the same error comes at the same update again."""
    message = " ".join(_ADDRESS.sub("0x...", str(error)).split())[:_MAX_CHARACTERS]
    return f"after {num_updates} updates: {type(error).__name__}{f': {message}' if message else ''}\n"


def _await_note(path: str) -> None:
    end_s = time.monotonic() + _VICTIM_WAIT_S
    while not os.path.exists(path) and time.monotonic() < end_s:
        time.sleep(0.05)


def _write_once(path: str, text: str) -> None:
    """Create the file with `text`, if there is none and the folder can be written to."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:  # another rank was first, or the disk is full, which must not hide the error itself
        if not isinstance(error, FileExistsError):
            print(f"ddpilot: the failure could not be noted in {path}: {error}", file=sys.stderr)  # noqa: T201
