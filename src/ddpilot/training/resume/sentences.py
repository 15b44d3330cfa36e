# SPDX-License-Identifier: Apache-2.0
"""Messages of a run with checkpoints, printed to stderr."""

from __future__ import annotations

from pathlib import Path

from ddpilot.checkpoint.manifest import Progress

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


def say_resumed(path: Path, progress: Progress, world_size: int, accumulation: int) -> str:
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
