# SPDX-License-Identifier: Apache-2.0
"""Run a callback when a module is imported, now or later, without importing it.

It must not matter whether `import lightning` precedes or follows ours, and importing it here would cost seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ddpilot.environments.interpreter import collector_paused

Action = Callable[[ModuleType], None]


class _Waiting(MetaPathFinder):
    """A finder at the front of `sys.meta_path` that finds nothing itself, and acts once a module has been loaded."""

    def __init__(self) -> None:
        self.actions: dict[str, dict[str, Action]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec found by other finders, with a loader that runs the actions; None without any for `name`."""
        if name not in self.actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._load(load, module)  # type: ignore[method-assign]
        return spec

    def _load(self, load: Callable[[ModuleType], Any], module: ModuleType) -> None:
        with collector_paused():
            load(module)
        for action in self.actions.pop(module.__name__, {}).values():
            action(module)


def when_imported(name: str, key: str, action: Action) -> None:
    """Call `action(module)` with the module `name`: now if it is imported, otherwise once it has been.

    A later action with the same `key` replaces one that has not run yet.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        action(module)
        return
    waiting = next((finder for finder in sys.meta_path if isinstance(finder, _Waiting)), None)
    if waiting is None:
        waiting = _Waiting()
        sys.meta_path.insert(0, waiting)
    waiting.actions.setdefault(name, {})[key] = action


def forget(name: str, key: str) -> None:
    """Remove the action that `when_imported` holds for `name` and `key`, if it has not run yet."""
    for finder in sys.meta_path:
        if isinstance(finder, _Waiting):
            finder.actions.get(name, {}).pop(key, None)
