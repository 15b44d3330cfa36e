# SPDX-License-Identifier: Apache-2.0
"""Progress bars for ranks other than rank 0, which show nothing."""

from __future__ import annotations

from typing import Any

from fastprogress.fastprogress import MasterBar, ProgressBar


class SilentBar(ProgressBar):  # type: ignore[misc]  # fastprogress is untyped
    """A progress bar that shows nothing."""


class SilentMasterBar(MasterBar):  # type: ignore[misc]  # fastprogress is untyped
    """A master bar that shows nothing."""

    pcls = SilentBar

    def __init__(self, gen: Any, total: int | None = None, **_looks: Any) -> None:
        super().__init__(gen, SilentBar, total)

    def write(self, line: Any, table: bool = False) -> None:
        """Do nothing."""

    def show_imgs(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""
