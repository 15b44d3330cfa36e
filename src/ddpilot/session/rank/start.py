# SPDX-License-Identifier: Apache-2.0
"""What a rank that stays is told before it becomes a kernel. Free of torch and IPython: the parent makes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class KernelStart:
    """The same for all ranks of a session; a rank finds its own files by its number."""

    folder: Path
    """The session's private folder."""

    incarnations: tuple[int, ...]
    """By rank: how often it was started before."""

    apps: tuple[str, ...] = ()
    seed: int | None = None
    keep_cache: bool = False
    verbose: bool = False

    def connection_file(self, rank: int) -> Path:
        """The kernel's connection file, which the parent has written."""
        return self.folder / f"{self.stem(rank)}.json"

    def parcel_socket(self, rank: int) -> Path:
        """Where the rank takes parcels."""
        return self.folder / f"{self.stem(rank)}.parcels"

    def stem(self, rank: int) -> str:
        """The beginning of the names of the rank's files; a rank that is started again has new ones."""
        return f"r{rank}.{self.incarnations[rank]}"
