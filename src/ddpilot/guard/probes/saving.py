# SPDX-License-Identifier: Apache-2.0
"""Note which files are saved, and where."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch

from ddpilot.guard.notes import SaveNote
from ddpilot.guard.probe import Notes

_MAX_NOTED = 10_000


class SavingProbe:
    """Notes files that torch.save and safetensors write: time and line."""

    name = "saving"

    def __init__(self) -> None:
        self._num_noted = 0

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        host = socket.gethostname()

        def begins(*_: Any, **__: Any) -> int:
            return time.monotonic_ns()

        def ends(begun: int | None, *args: Any, **kwargs: Any) -> None:
            path = _path_of(args[1:] or tuple(kwargs.get(name) for name in ("f", "filename")))
            if not path or begun is None or self._num_noted >= _MAX_NOTED:
                return
            self._num_noted += 1
            end_ns = time.monotonic_ns()
            notes.write("save", SaveNote(path=path, host=host, start_ns=begun, end_ns=end_ns, site=notes.site()))

        places: tuple[tuple[Any, str, tuple[Any, ...]], ...] = (
            (torch, "save", (torch.serialization,)),
            (safetensors.torch, "save_file", ()),
        )
        return [notes.around(owner, name, before=begins, after=ends, aliases=also) for owner, name, also in places]


def _path_of(targets: tuple[Any, ...]) -> str:
    """Return the regular file that the first of `targets` refers to; empty for anything else."""
    target = next((one for one in targets[:1] + targets[1:2] if one is not None), None)
    if not isinstance(target, str | os.PathLike):
        target = getattr(target, "name", None)
    if not isinstance(target, str | os.PathLike):
        return ""
    path = os.path.realpath(os.fsdecode(target))
    return path if os.path.isfile(path) else ""
