# SPDX-License-Identifier: Apache-2.0
"""Downloads: one rank of a machine at a time, so that the first one loads and the others find it there."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Wait until no other process of this user on this machine is inside with the same `what`.

    A lock and no barrier: whoever comes later may not even ask, because the file is there.
    """
    digest = hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
    path = Path(tempfile.gettempdir()) / f"ddpilot-{os.getuid()}-{digest}.lock"
    with _locked(path):
        try:
            yield
        finally:
            path.unlink()


def _locked(path: Path) -> IO[str]:
    while True:
        file = path.open("a")
        fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # whoever had it before has removed it


def untar_once(original: Callable[..., Path], url: str, *args: Any, **kwargs: Any) -> Path:
    """`untar_data` on a rank."""
    with one_at_a_time(url):
        return original(url, *args, **kwargs)


def download_once(original: Callable[..., None], url: str, dst: str, *args: Any, **kwargs: Any) -> None:
    """`torch.hub.download_url_to_file` on a rank; its callers have looked for `dst` before they came here."""
    with one_at_a_time(dst):
        if not os.path.exists(dst):
            original(url, dst, *args, **kwargs)
