# SPDX-License-Identifier: Apache-2.0
"""`KernelStart`: arguments of a rank's kernel. Imports neither torch nor IPython, as the parent creates it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpilot.module_names import SESSION_MAIN
from ddpilot.output.cell_sources import install_sources


@dataclass(frozen=True, kw_only=True)
class KernelStart:
    """Arguments of the kernels, the same for all ranks of a session; file names are derived from the rank."""

    folder: Path
    """The session's private folder."""

    incarnations: tuple[int, ...]
    """By rank: number of times that it was started before."""

    apps: tuple[str, ...] = ()
    seed: int | None = None
    keep_cache: bool = False
    verbose: bool = False

    def connection_file(self, rank: int) -> Path:
        """Return the path of the kernel's connection file, which the parent has written."""
        return self.folder / f"{self.stem(rank)}.json"

    def parcel_socket(self, rank: int) -> Path:
        """Return the path of the socket on which the rank accepts parcels."""
        return self.folder / f"{self.stem(rank)}.parcels"

    def stem(self, rank: int) -> str:
        """Return the common prefix of the rank's file names, which differs after each restart."""
        return f"r{rank}.{self.incarnations[rank]}"


def serve(start: KernelStart) -> None:
    """Run a kernel until the session ends."""
    importlib.import_module(SESSION_MAIN).serve_kernel(start)


def call_with_sources(sources: dict[str, list[str]], fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Install `sources` for `linecache` on this rank and return `fn(*args, **kwargs)`."""
    install_sources(sources)
    return fn(*args, **kwargs)
