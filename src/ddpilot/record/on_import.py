# SPDX-License-Identifier: Apache-2.0
"""Do something when a module is imported, now or later, without importing it.

Whether `import lightning` stands above or below ours must not matter, and importing it here would cost seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class _Waiting(MetaPathFinder):
    """Stands first on `sys.meta_path`, finds nothing itself, and acts when what others found has been loaded."""

    def __init__(self) -> None:
        self.actions: dict[str, dict[str, Action]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find, with a loader that acts afterwards; None for what nobody waits for."""
        if name not in self.actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._load(load, module)  # type: ignore[method-assign]
        return spec

    def _load(self, load: Callable[[ModuleType], Any], module: ModuleType) -> None:
        load(module)
        for action in self.actions.pop(module.__name__, {}).values():
            action(module)


def when_imported(name: str, key: str, action: Action) -> None:
    """Call `action(module)` with the module `name`: now if it is there, else once it has been imported.

    Of several actions of one `key` that wait for the module, the last counts.
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
    """Take back what `when_imported` was told for `name` under `key`, where it still waits."""
    for finder in sys.meta_path:
        if isinstance(finder, _Waiting):
            finder.actions.get(name, {}).pop(key, None)
