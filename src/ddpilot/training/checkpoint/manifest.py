# SPDX-License-Identifier: Apache-2.0
"""`manifest.json`: where the run stood, and the size and checksum of every file, its own included."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from ddpilot.errors import CheckpointError, CorruptCheckpointError, MismatchedCheckpointError
from ddpilot.training.checkpoint.files import FileFacts

FILE_NAME = "manifest.json"
FORMAT = 1
"""What this version writes; it reads this and older ones."""

_MEANINGS = {
    "dataset_length": "the dataset has another length",
    "global_batch_size": "the position in the epoch counts global batches of another size",
    "seed": "another seed gives another order of samples",
    "batches": "shuffling, drop_last, weights, a sampler, or who divides the data is another",
    "accumulate": "the rest of the epoch would make other updates",
}
_OTHER_SAMPLES = ("dataset_length", "batches")


_OTHER_DATA = "Go on with the new data by loop.resume(other_data=True), or fit(..., other_data=True). Or resume"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands. The position in the data is two integers, the same at any number of ranks."""

    step: int
    """Optimizer steps done since the start of training."""
    epoch: int = 0
    """The epoch that is under way, from 0."""
    batch: int = 0
    """Global batches of that epoch that are done: the loader goes on with this one."""
    passes: int = 0
    """Passes over a loader that the epoch has behind it; above 0 where an epoch has several, or its data are done."""
    samples_seen: int = 0
    """Samples of all ranks and epochs so far."""
    seed: int | None = None
    """Of the order of samples; None: unknown."""
    world_size: int = 1
    """Ranks at the time of saving."""
    dataset_length: int | None = None
    """Samples of an epoch; None: unknown."""
    global_batch_size: int | None = None
    """Samples of a global batch; None: unknown."""
    batches: str | None = None
    """Fingerprint of how samples make global batches; None: unknown."""
    accumulate: int | None = None
    """Batches that make one update; None: unknown."""

    def require(self, *, source: str = "", **now: int | str | None) -> None:
        """Refuse to go on with other data.

        `now`: `dataset_length`, `global_batch_size`, `seed`, `batches` and `accumulate` of this run, as keywords;
        None says nothing. `source` names the checkpoint. Raises MismatchedCheckpointError that names what differs.
        """
        unknown = set(now) - set(_MEANINGS)
        if unknown:
            raise TypeError(f"require() knows {', '.join(_MEANINGS)}, not {', '.join(sorted(unknown))}")
        before = {name: getattr(self, name) for name in now}
        differing = [name for name, value in now.items() if None not in (value, before[name]) and value != before[name]]
        if len(differing) > 1 and "batches" in differing:
            differing.remove("batches")  # a consequence of the others
        if differing:
            rest = ", so the rest of the epoch would be other samples" if self.batch else ""
            meanings = {name: _MEANINGS[name] + (rest if name in _OTHER_SAMPLES else "") for name in differing}
            changes = [
                meanings[name]
                if name == "batches"
                else f"`{name}` was {before[name]}, is {now[name]} ({meanings[name]})"
                for name in differing
            ]
            takes_other = differing == ["dataset_length"] and not self.batch
            raise MismatchedCheckpointError(
                f"resuming {source or 'a run'} at step {self.step}",
                found="; ".join(changes),
                fix=(_OTHER_DATA if takes_other else "Resume")
                + " with the old values, start from scratch with `resume=False`, or take the weights alone "
                "(`loop.load`).",
            )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself."""

    progress: Progress
    """Where the run stood."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values that came with it, such as validation accuracy."""
    files: Mapping[str, FileFacts] = field(default_factory=dict)
    """Every file but the manifest, by name."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """ddpilot, torch and python that wrote it."""
    saved_at: str = ""
    """When, in UTC, ISO 8601."""

    def render(self) -> str:
        """The text of `manifest.json`. The checksum in it covers everything else in it."""
        body = {"format": FORMAT, **asdict(self)}
        return json.dumps({**body, "checksum": checksum(body)}, indent=2) + "\n"

    @property
    def checksum(self) -> str:
        """SHA-256 over everything here, and so over the checkpoint: two with the same one are the same."""
        return checksum({"format": FORMAT, **asdict(self)})


def checksum(body: Mapping[str, Any]) -> str:
    """SHA-256 of `body` as JSON with sorted keys and no blanks, in hexadecimal."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def now_and_here() -> dict[str, Any]:
    """Fields `versions` and `saved_at` of a manifest written now by this process."""
    versions = {"ddpilot": version("ddpilot"), "torch": version("torch"), "python": platform.python_version()}
    return {"versions": versions, "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def parse_manifest(text: str, *, where: str) -> Manifest:
    """The manifest in `text`; `where` names the checkpoint in errors.

    Raises CorruptCheckpointError where it is torn or was changed, CheckpointError where a newer version wrote it.
    """
    try:
        body = json.loads(text)
        claimed = body.pop("checksum")
        if body["format"] > FORMAT:
            raise CheckpointError(
                f"reading {where}",
                found=f"its format is {body['format']}, this ddpilot reads up to {FORMAT}",
                fix=f"Use ddpilot {body['versions']['ddpilot']} or newer.",
            )
        if checksum(body) != claimed:
            raise ValueError("its own checksum does not fit")
        del body["format"]
        files = {name: FileFacts(**facts) for name, facts in body.pop("files").items()}
        return Manifest(progress=Progress(**body.pop("progress")), files=files, **body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"reading {where}", found=f"{FILE_NAME} is torn or was changed ({type(error).__name__}: {error})"
        ) from error
