# SPDX-License-Identifier: Apache-2.0
"""Writes one checkpoint: all files into a staging directory, the manifest last, then an atomic rename."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from ddpilot.checkpoint.atomic_files import FileFacts, Sink, publish, staging
from ddpilot.checkpoint.manifest import FILE_NAME, Manifest, Progress, now_and_here
from ddpilot.checkpoint.safetensors_file import write_safetensors

STAGING_PREFIX = ".writing-"
STATE_FILE = "state.pt"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a checkpoint, in CPU memory; not modified while they are written."""

    progress: Progress
    metrics: Mapping[str, float]
    weights: Mapping[str, Mapping[str, torch.Tensor]]
    """By model name, then by plain tensor name."""
    state: Mapping[str, Any]
    """State dicts by name, the same on all ranks."""
    parts: Sequence[Mapping[str, Any]]
    """The state of each rank, in rank order."""


def weights_file(name: str) -> str:
    """Return the file name of the weights called `name`."""
    return f"{name}.safetensors"


def part_file(rank: int) -> str:
    """Return the file name of the state of rank `rank`."""
    return f"rank-{rank}.pt"


def write_checkpoint(folder: Path, name: str, contents: Contents) -> Path:
    """Write `contents` to the directory `name` in `folder` and return its path.

    Raises OSError, after removing all that was written. The caller ensures that `name` is new.
    """
    with staging(folder, f"{STAGING_PREFIX}{name}-") as staged:
        files = {}
        for model, weights in contents.weights.items():
            files[weights_file(model)] = _write(staged / weights_file(model), write_safetensors, weights)
        files[STATE_FILE] = _write(staged / STATE_FILE, _write_torch, dict(contents.state))
        for rank, part in enumerate(contents.parts):
            files[part_file(rank)] = _write(staged / part_file(rank), _write_torch, dict(part))
        manifest = Manifest(progress=contents.progress, metrics=dict(contents.metrics), files=files, **now_and_here())
        _write(staged / FILE_NAME, Sink.write, manifest.render().encode())
        return publish(staged, name)


def _write(path: Path, write: Callable[[Sink, Any], object], what: object) -> FileFacts:
    try:
        with Sink(path) as sink:
            write(sink, what)
    except OSError as error:
        error.filename = error.filename or str(path.name)
        raise
    return sink.facts


def _write_torch(sink: Sink, tree: Mapping[str, Any]) -> None:
    try:
        torch.save(tree, cast(IO[bytes], sink))
    except RuntimeError as error:
        if sink.error is None:
            raise
        raise sink.error from error
