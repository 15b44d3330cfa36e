# SPDX-License-Identifier: Apache-2.0
"""`RemoteStore`: the files below an fsspec URL, with errors that name the file, the URL and what to do."""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ddpilot.errors import CheckpointError

STAGING_VARIABLE = "DDPILOT_STAGING_DIR"
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)", re.DOTALL)
_MANGLED = re.compile(r"(s3|s3a|gs|gcs|az|abfs|abfss|adl|hdfs|memory|file|sftp|ssh|http|https|ftp):/[^/].*")
"""A URL that went through `pathlib.Path`, which turns "//" into "/"."""
_NO_CREDENTIALS = re.compile("credential|token|unauthorized|authenticat", re.IGNORECASE)


def is_url(path: object) -> bool:
    """True if `path` is a URL, not a local path. Raises CheckpointError for a URL that `pathlib.Path` has changed."""
    if isinstance(path, os.PathLike) and _MANGLED.fullmatch(os.fspath(path)):
        found = f"a {type(path).__name__} {os.fspath(path)!r}, in which a URL has lost a slash"
        raise CheckpointError("opening a checkpoint directory", found=found, fix="Pass the URL as a string.")
    return isinstance(path, str) and _URL.fullmatch(path.strip()) is not None


def clean_url(url: str) -> str:
    """Return `url` without spaces and slashes around it, with its protocol in lower case. Raises as `check_backend`."""
    check_backend(url)
    protocol, _, rest = url.strip().partition("://")
    return f"{protocol.lower()}://{rest.rstrip('/')}"


def without_password(url: str) -> str:
    """Return `url` with "***" in place of a password in it."""
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", url)


def check_backend(url: str) -> None:
    """Raise CheckpointError if fsspec, or the package that it needs for `url`, is not installed. Imports neither."""
    did = f"using the checkpoint directory {without_password(url)}"
    matched = _URL.fullmatch(url.strip())
    protocol, rest = (matched[1].lower(), matched[2]) if matched else ("", "")
    if not rest.strip("/"):
        raise CheckpointError(did, found="the URL names no bucket and no folder", fix="Write s3://bucket/run7.")
    if importlib.util.find_spec("fsspec") is None:
        found = "the package fsspec is not installed"
        fix = "pip install 'ddpilot[remote]', and what fsspec needs for these URLs: s3fs for s3://, gcsfs for gs://."
        raise CheckpointError(did, found=found, fix=fix)
    from fsspec.registry import known_implementations, registry

    if protocol in registry:
        return
    if protocol not in known_implementations:
        found = f"fsspec knows no file system for {protocol}://"
        raise CheckpointError(did, found=found, fix="Correct the URL, or install the package with that file system.")
    module = str(known_implementations[protocol]["class"]).replace(":", ".").split(".")[0]
    if importlib.util.find_spec(module) is None:
        found = f"fsspec needs the package {module} for {protocol}://, which is not installed"
        raise CheckpointError(did, found=found, fix=f"pip install {module}")


def check_writable_url(url: str) -> None:
    """Write, list and delete a file at `url`. Raises CheckpointError if that fails."""
    store, name = RemoteStore(clean_url(url)), f".probe-{secrets.token_hex(4)}"
    store.write(name, "can this be written?")
    store.list()
    store.remove(name)


def staging_folder(url: str, staging_dir: str | os.PathLike[str] | None) -> Path:
    """Return the local directory for checkpoints of `url`: a subdirectory of `staging_dir`, named after the URL.

    Default of `staging_dir`: the environment variable DDPILOT_STAGING_DIR, else ~/.cache/ddpilot/checkpoints (or the
    same in XDG_CACHE_HOME).
    """
    parent = staging_dir or os.environ.get(STAGING_VARIABLE)
    if not parent:
        cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        parent = Path(cache) / "ddpilot" / "checkpoints"
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", without_password(url).split("://")[1]).strip("-.")[-60:]
    return Path(parent).expanduser().absolute() / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


class RemoteStore:
    """The files below `url`. Names are relative to it. All methods raise CheckpointError, whatever the backend raises.

    Threads may share it. The backend is imported at the first use.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.url = without_password(url)
        """The URL for messages."""

    @functools.cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system and the path of the URL in it."""
        from fsspec.core import url_to_fs

        # Not fsspec's shared instance: a listing that the user's code has cached would be out of date.
        file_system, root = url_to_fs(self._url, skip_instance_cache=True)
        return file_system, str(root).rstrip("/")

    def list(self, folder: str = "") -> dict[str, int]:
        """Return the size in bytes of each file below `folder`, by name; {} if there are none."""
        with self._explaining("listing", folder):
            file_system, root = self._opened
            file_system.invalidate_cache()
            try:
                found = file_system.find(f"{root}/{folder}".rstrip("/"), detail=True)
            except FileNotFoundError:
                return {}
            return {path[len(root) :].lstrip("/"): int(info["size"] or 0) for path, info in found.items()}

    def read(self, name: str) -> str | None:
        """Return the text of a file; None if it does not exist."""
        with self._explaining("reading", name):
            file_system, root = self._opened
            try:
                return bytes(file_system.cat_file(f"{root}/{name}")).decode("utf-8", errors="replace")
            except FileNotFoundError:
                return None

    def write(self, name: str, text: str) -> None:
        """Write a file."""
        with self._explaining("writing", name):
            file_system, root = self._opened
            self._make_parent(name)
            file_system.pipe_file(f"{root}/{name}", text.encode())

    def put(self, local: Path, name: str) -> None:
        """Upload the file `local`."""
        with self._explaining(f"uploading {local} to", name):
            file_system, root = self._opened
            self._make_parent(name)
            file_system.put_file(str(local), f"{root}/{name}")

    def get(self, name: str, local: Path) -> bool:
        """Download a file to `local`. False if it does not exist."""
        with self._explaining("downloading", name):
            file_system, root = self._opened
            try:
                file_system.get_file(f"{root}/{name}", str(local))
            except FileNotFoundError:
                return False
            with open(local, "rb") as file:
                os.fsync(file.fileno())
            return True

    def remove(self, name: str) -> None:
        """Delete a file; it may be deleted already."""
        with self._explaining("deleting", name), suppress(FileNotFoundError):
            file_system, root = self._opened
            file_system.rm_file(f"{root}/{name}")

    def remove_folder(self, name: str) -> None:
        """Delete the empty directory `name`, if the file system has directories."""
        file_system, root = self._opened
        if root.startswith("/"):
            with suppress(OSError):
                file_system.rmdir(f"{root}/{name}")

    def _make_parent(self, name: str) -> None:
        file_system, root = self._opened
        if root.startswith("/"):  # object stores have no directories, and s3fs would create a bucket
            file_system.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _explaining(self, did: str, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each backend raises errors of its own
            where = f"{self.url}/{name}" if name else self.url
            raise CheckpointError(f"{did} {where}", found=_describe(error), fix=_advise(error)) from error


def _describe(error: Exception) -> str:
    text = next(iter(str(error).splitlines()), "")
    return f"{text} ({type(error).__name__})" if text else type(error).__name__


def _advise(error: Exception) -> str:
    if _NO_CREDENTIALS.search(f"{type(error).__name__} {error}"):
        return (
            "Give the credentials where fsspec's package for these URLs reads them (for S3: AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, a role or ~/.aws), on every node."
        )
    if isinstance(error, FileNotFoundError):
        return "Create the bucket or folder, or correct the URL."
    if isinstance(error, PermissionError):
        return "Let these credentials read, write, list and delete there."
    if isinstance(error, ImportError):
        return "Install what the message names."
    if isinstance(error, OSError) and error.errno in (28, 122):
        return "Free some space, or choose a different `staging_dir`."
    return "Check the URL, the network and the credentials."


MAX_QUEUED = 2
"""Number of checkpoints that are uploaded or wait for it; a save waits while there are that many."""
_PATIENCE_S = 5.0
"""Seconds of waiting after which it is reported."""


def at_exit(call: Callable[[], object]) -> None:
    """Call `call` when the interpreter exits, while threads, which backends need for uploads, can still be started."""
    register = getattr(threading, "_register_atexit", atexit.register)
    with suppress(RuntimeError):  # the interpreter exits already
        register(call)


class Uploads:
    """Checkpoints to upload, by name, one after the other, in a thread that ends with the last one.

    `upload`: uploads one; raises CheckpointError. `report`: called, on the thread that waits or polls, with messages.
    """

    def __init__(self, upload: Callable[[str], None], url: str, report: Callable[[str], None]) -> None:
        self._upload = upload
        self._url = url
        self._report = report
        self._condition = threading.Condition()
        self._queue: list[str] = []
        self._failed: dict[str, CheckpointError] = {}
        self._notes: list[str] = []
        self._reported: set[str] = set()
        self._is_running = False

    @property
    def queued(self) -> list[str]:
        """Names of the checkpoints that are being uploaded or wait for it, oldest first."""
        with self._condition:
            return list(self._queue)

    @property
    def failed(self) -> dict[str, CheckpointError]:
        """The checkpoints whose upload failed, by name, with the errors."""
        with self._condition:
            return dict(self._failed)

    def add(self, name: str) -> None:
        """Upload the checkpoint `name` in the background."""
        with self._condition:
            self._failed.pop(name, None)
            self._queue.append(name)
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._run, name="ddpilot-upload").start()

    def note(self, text: str) -> None:
        """Report `text` when the main thread polls or waits next."""
        self._notes.append(text)

    def poll(self) -> None:
        """Report failures so far, without waiting."""
        while self._notes:
            self._report(self._notes.pop(0))

    def wait_for_room(self) -> None:
        """Wait while too many checkpoints are queued, which is reported."""
        text = (
            f"training waits for uploads to {self._url}: {{num}} checkpoints are not there yet. This is reported once; "
            "save less often, or to a faster store"
        )
        self._wait(MAX_QUEUED - 1, text, after_s=0.0)

    def drain(self) -> bool:
        """Wait for all uploads, after trying failed ones again; report failures. True if all are uploaded."""
        for name in list(self._failed):
            self.add(name)
        self._wait(0, f"waiting for uploads to {self._url}: {{num}} to go", after_s=_PATIENCE_S)
        self.poll()
        return not self._failed

    def forget(self, name: str) -> None:
        """Do not try a failed upload again."""
        with self._condition:
            self._failed.pop(name, None)

    def _wait(self, num_allowed: int, text: str, after_s: float) -> None:
        def has_room() -> bool:
            return len(self._queue) <= num_allowed

        with self._condition:
            if not self._condition.wait_for(has_room, timeout=after_s):
                if text not in self._reported:
                    self._reported.add(text)
                    self._report(text.replace("{num}", str(len(self._queue))))
                self._condition.wait_for(has_room)
            if num_allowed == 0:
                self._condition.wait_for(lambda: not self._is_running)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.notify_all()
                if not self._queue:
                    self._is_running = False
                    return
                name = self._queue[0]
            failure = self._try(name)
            with self._condition:
                self._queue.pop(0)
                if failure is not None:
                    self._failed[name] = failure
                elif self._failed and not self._queue:  # the store can be reached again
                    self._queue.append(next(iter(self._failed)))
                    del self._failed[self._queue[0]]

    def _try(self, name: str) -> CheckpointError | None:
        try:
            self._upload(name)
        except CheckpointError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  (whatever it is, it is reported)
            failure = CheckpointError(f"uploading {name} to {self._url}", found=f"{type(error).__name__}: {error}")
        else:
            return None
        self.note(f"{name} was not uploaded: {str(failure).rstrip('.')}. The upload is tried again")
        return failure
