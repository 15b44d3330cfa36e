# SPDX-License-Identifier: Apache-2.0
"""An IPython shell without a terminal, and a front end that records what is published."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


@contextmanager
def ipython_shell() -> Iterator[Any]:
    """A shell without history; the interpreter is left as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "displayhook", sys.displayhook)
        patch.setattr(sys, "excepthook", sys.excepthook)
        patch.setattr(sys, "path", list(sys.path))
        patch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        config = Config()
        config.HistoryManager.enabled = False
        config.HistoryManager.hist_file = ":memory:"
        make: Any = InteractiveShell  # partly untyped
        shell = make(config=config)
        try:
            yield shell
        finally:
            shell.atexit_operations()
            atexit.unregister(shell.atexit_operations)
            shell.restore_sys_module_state()


class FrontEnd:
    """Applies display messages as Jupyter does: an update replaces the display with its id, clearing removes all."""

    def __init__(self) -> None:
        self.outputs: list[tuple[str, dict[str, Any]]] = []
        self.num_updates = 0
        self.metadata: list[dict[str, Any] | None] = []
        self._clears_next = False

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
    ) -> None:
        """Take a display or an update."""
        self.metadata.append(metadata)
        display_id = (transient or {}).get("display_id", "")
        if update:
            self.num_updates += 1
            self.outputs = [(name, data if name == display_id else shown) for name, shown in self.outputs]
            return
        if self._clears_next:
            self.outputs.clear()
            self._clears_next = False
        self.outputs.append((display_id, data))

    def clear_output(self, wait: bool = False) -> None:
        """Remove all displays, with `wait` when the next one is published."""
        self._clears_next = wait
        if not wait:
            self.outputs.clear()

    @property
    def texts(self) -> list[str]:
        """The displayed texts, including labels."""
        return [data["text/plain"] if "-label" in name else data["text/html"] for name, data in self.outputs]
