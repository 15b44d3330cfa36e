# SPDX-License-Identifier: Apache-2.0
"""Downloads by one rank per machine at a time, so that the other ranks find the file."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ddpilot.environments.own_files import lock_file, open_own_file, own_temporary_folder


@contextlib.contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Wait until no other process of this user on this machine is inside with the same `what`.

    A lock instead of a barrier, as ranks that find the file may not call this at all. Raises `PermissionError` if
    another user owns a file at the lock's path.
    """
    digest = hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
    path = own_temporary_folder().with_name(f"{own_temporary_folder().name}-{digest}.lock")
    fd = _locked(path)
    try:
        yield
    finally:
        path.unlink()
        os.close(fd)


def _locked(path: Path) -> int:
    while True:
        fd = open_own_file(path, os.O_RDWR | os.O_CREAT)
        try:
            lock_file(fd)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.stat()):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the process that held the lock has removed the file


def untar_once(original: Callable[..., Path], url: str, *args: Any, **kwargs: Any) -> Path:
    """Wrap `untar_data` on a rank."""
    with one_at_a_time(url):
        return original(url, *args, **kwargs)


def download_once(original: Callable[..., None], url: str, dst: str, *args: Any, **kwargs: Any) -> None:
    """Wrap `torch.hub.download_url_to_file` on a rank, whose callers have checked that `dst` does not exist."""
    with one_at_a_time(dst):
        if not os.path.exists(dst):
            original(url, dst, *args, **kwargs)
