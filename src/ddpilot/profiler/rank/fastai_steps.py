# SPDX-License-Identifier: Apache-2.0
"""Observe the steps of fastai's optimizers: they are not torch's, and call none of its hooks."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddpilot.guard.probe import Notes
from ddpilot.launching.on_import import forget, when_imported

_MODULE, _KEY = "fastai.optimizer", "time of updates"


def observe_steps(notes: Notes, begins: Callable[..., Any], ends: Callable[..., Any]) -> Callable[[], None]:
    """Call `begins` and `ends` as torch's hooks around each step, once fastai is imported. Returns an undo function."""
    undo: list[Callable[[], None]] = []

    def before(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        begins(optimizer, args, kwargs)

    def after(_ticket: None, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        ends(optimizer, args, kwargs)

    def install(module: ModuleType) -> None:
        undo.append(notes.around(module.Optimizer, "step", before=before, after=after))

    def remove() -> None:
        forget(_MODULE, _KEY)
        while undo:
            undo.pop()()

    when_imported(_MODULE, _KEY, install)
    return remove
