# SPDX-License-Identifier: Apache-2.0
"""Downloads by one rank per machine at a time, so that the other ranks find the file."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ddpilot.environments.private_files import lock_file, make_own_folder, open_own_file, own_temporary_folder


@contextlib.contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Context manager: hold the lock `name`, which one process of this user on this machine can hold at a time.

    This is a lock and not a barrier, as a rank that comes later may find the file and never call this. No lock is
    taken if this user cannot have a folder in the temporary directory, for example if another user has taken its name.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    path = own_temporary_folder() / f"{digest}.lock"
    fd = None
    with contextlib.suppress(OSError):
        make_own_folder(path.parent)
        fd = _locked(path)
    try:
        yield
    finally:
        if fd is not None:
            path.unlink(missing_ok=True)
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
    """Run `torch.hub.download_url_to_file` on one rank of this machine at a time, unless `dst` exists by then.

    Callers check for `dst` before they call this, when another rank may still be downloading it.
    """
    with one_at_a_time(dst):
        if not os.path.exists(dst):
            original(url, dst, *args, **kwargs)
