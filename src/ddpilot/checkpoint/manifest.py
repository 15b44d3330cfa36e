# SPDX-License-Identifier: Apache-2.0
"""`manifest.json`: position and metrics of a run, and size and checksum of every file, including itself."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any, Literal, cast

from ddpilot.checkpoint.atomic_files import FileFacts
from ddpilot.errors import CheckpointError, CorruptCheckpointError, LoopError

FILE_NAME = "manifest.json"
FORMAT = 1
"""The format version that is written; older versions can be read."""


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """The position of a run. The position in the data is two integers, independent of world_size."""

    step: int
    """Number of optimizer steps since the start of training."""
    epoch: int = 0
    """The current epoch, from 0."""
    batch: int = 0
    """Number of completed global batches in that epoch: the loader resumes at this index."""
    passes: int = 0
    """Number of completed passes over a loader in the epoch; above 0 if it has several or its data are complete."""
    samples_seen: int = 0
    """Number of samples of all ranks and epochs so far."""
    seed: int | None = None
    """Seed of the order of samples; None: unknown."""
    world_size: int = 1
    """Number of ranks when it was saved."""
    dataset_length: int | None = None
    """Number of samples per epoch; None: unknown."""
    global_batch_size: int | None = None
    """Number of samples per global batch; None: unknown."""
    batches: str | None = None
    """Fingerprint of how samples form global batches; None: unknown."""
    accumulate: int | str | None = None
    """Number of batches per update; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of `manifest.json`."""

    progress: RunProgress
    """The position of the run."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics passed to the save, such as validation accuracy."""
    files: Mapping[str, FileFacts] = field(default_factory=dict)
    """Size and checksum of every file except the manifest, by name."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of ddpilot, torch and python that wrote it."""
    saved_at: str = ""
    """Time of the save, in UTC, as ISO 8601."""

    def render(self) -> str:
        """Return the text of `manifest.json`, including a checksum of all its other fields."""
        body = {"format": FORMAT, **asdict(self)}
        return json.dumps({**body, "checksum": checksum(body)}, indent=2) + "\n"

    @property
    def checksum(self) -> str:
        """SHA-256 of all fields, and thus of the checkpoint: equal for identical checkpoints only."""
        return checksum({"format": FORMAT, **asdict(self)})


def checksum(body: Mapping[str, Any]) -> str:
    """Return the SHA-256 of `body` as JSON with sorted keys and without whitespace, in hexadecimal."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def now_and_here() -> dict[str, Any]:
    """Return the fields `versions` and `saved_at` of a manifest written now by this process."""
    versions = {"ddpilot": version("ddpilot"), "torch": version("torch"), "python": platform.python_version()}
    return {"versions": versions, "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def parse_manifest(text: str, *, where: str) -> Manifest:
    """Parse the text of a manifest; `where` names the checkpoint in errors.

    Raises CorruptCheckpointError if it is truncated or was changed, CheckpointError if a newer version wrote it.
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
            raise ValueError("its own checksum does not match")
        del body["format"]
        return _parse_body(body, where)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"reading {where}", found=f"{FILE_NAME} is truncated or was changed ({type(error).__name__}: {error})"
        ) from error


def _parse_body(body: dict[str, Any], where: str) -> Manifest:
    """Return the manifest with these fields, whose checksum matches. Raises CheckpointError for unknown ones."""
    try:
        files = {name: FileFacts(**facts) for name, facts in body["files"].items()}
        return Manifest(**{**body, "progress": RunProgress(**body["progress"]), "files": files})
    except (KeyError, TypeError, AttributeError) as error:
        own, written = version("ddpilot"), body.get("versions")
        raise CheckpointError(
            f"reading {where}",
            found=f"{FILE_NAME} is intact, and its fields are not those of this ddpilot, {own} ({error})",
            fix=f"Use the version that wrote it: {written or 'unknown'}.",
        ) from error


@dataclass(frozen=True)
class Monitor:
    """A metric to compare by. Raises LoopError for other modes than "min" and "max" and for a negative `min_delta`."""

    name: str
    """The metric's name."""
    mode: Literal["min", "max"]
    """"max" if a larger value is better, "min" if a smaller one is."""
    min_delta: float = 0.0
    """Improvements of at most this much do not count."""

    def __post_init__(self) -> None:
        did = f"monitoring {self.name!r}"
        if self.mode not in ("min", "max"):
            raise LoopError(did, found=f"`mode` is {self.mode!r}", fix="Use 'min' (as for a loss) or 'max'.")
        if not self.min_delta >= 0:
            raise LoopError(did, found=f"`min_delta` is {self.min_delta}", fix="Use 0 or more.")

    @classmethod
    def parse(cls, text: str) -> Monitor:
        """Parse "max accuracy" or "min loss". Raises CheckpointError for other texts."""
        mode, _, name = text.strip().partition(" ")
        if mode not in ("min", "max") or not name.strip():
            found = f"`best` is {text!r}"
            raise CheckpointError("choosing the best checkpoint", found=found, fix='Use "max acc" or "min loss".')
        return cls(name.strip(), cast(Literal["min", "max"], mode))

    def is_better(self, value: float, best: float | None) -> bool:
        """True if `value` is better than `best`, which is None or NaN if there is none yet. False for NaN and a tie."""
        if math.isnan(value):
            return False
        if best is None or math.isnan(best):
            return True
        return (value - best if self.mode == "max" else best - value) > self.min_delta

    def reaches(self, value: float, goal: float) -> bool:
        """True if `value` is `goal` or better. False for NaN."""
        return value >= goal if self.mode == "max" else value <= goal

    def __str__(self) -> str:
        return f"{self.mode} {self.name}"
