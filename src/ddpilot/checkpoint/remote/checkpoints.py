# SPDX-License-Identifier: Apache-2.0
"""`RemoteCheckpoints`: the checkpoints at a URL, and their copies in a local staging directory.

The manifest of a checkpoint, with the size and the SHA-256 of each file, is uploaded last and deleted first: a folder
without it is an interrupted upload, and not a checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

from ddpilot.checkpoint.atomic_files import move_aside, publish, read_facts, staging
from ddpilot.checkpoint.format import (
    BEST,
    CHECKPOINT_NAME,
    STAGING_PREFIX,
    Checkpoint,
    checkpoint_number,
    local_names,
    read_checkpoint,
    read_pointer,
)
from ddpilot.checkpoint.manifest import FILE_NAME, Manifest, parse_manifest
from ddpilot.checkpoint.remote.store import RemoteStore, Uploads
from ddpilot.errors import CheckpointError, CorruptCheckpointError

_UPLOADED = ".uploaded"
"""Empty file in the local copy of a checkpoint that is complete at the URL."""
_WRITER = "writer.json"
_EARLIER = "earlier-"
_FETCHING = ".fetching"


class RemoteCheckpoints:
    """The checkpoints at `url`, copied through the local directory `folder`. One process writes; any process reads.

    `keep`: number of newest checkpoints to keep at the URL, None for all. `report`: called with messages for the user.
    Methods raise CheckpointError if the store cannot be used.
    """

    def __init__(self, url: str, folder: Path, keep: int | None, report: Callable[[str], None]) -> None:
        self._store = RemoteStore(url)
        self._folder = folder
        self._keep = keep
        self._report = report
        self._token = ""
        self._best = ""
        self._own: list[str] = []
        self.url = self._store.url
        self.uploads = Uploads(self._upload, self.url, report)
        self.best_metrics: Mapping[str, float] = {}
        """Metrics of the best checkpoint so far; {} if there is none."""
        self.last_number = 0
        """The largest number of a checkpoint at the URL, also of an interrupted upload."""

    def check_writable(self) -> None:
        """Claim the URL for this process by a file there, which shows that it can be written, and read what is there.

        A claim of a different process that has not ended properly is reported; that process is refused from now on.
        """
        try:
            self._claim(self._report)
            files = self._store.list()
            if _WRITER not in files:
                found = f"the file {_WRITER} that was just written is not listed"
                raise CheckpointError(f"listing {self.url}", found=found, fix="Let these credentials list it.")
        except CheckpointError as error:
            error.fix = f"Training has not started. {error.fix}"
            raise
        self.last_number = max([0, *(checkpoint_number(name) for name in _folders(files))])
        complete = self._complete(files)
        self._best = (self._store.read(BEST) or "").strip() if BEST in files else ""
        if self._best in complete:
            with contextlib.suppress(CorruptCheckpointError):  # a different one is chosen then
                self.best_metrics = self._manifest(self._best).metrics
        self._keep_lost(complete)
        self._remove_copies(complete)

    @property
    def is_open(self) -> bool:
        """True if checkpoints may be on their way, or this process holds the claim."""
        return bool(self._token or self.uploads.queued)

    def names(self) -> list[str]:
        """Return the names of the checkpoints that are complete at the URL, newest first. Contents are not verified."""
        return self._complete(self._store.list())

    def finish_interrupted(self) -> None:
        """Upload the newest checkpoint of the local directory if it is newer than all at the URL; reported.

        An earlier run was then interrupted in the upload; its best checkpoint is uploaded, too. For the process that
        has called `check_writable` only.
        """
        if not self._token:
            return
        self.uploads.drain()
        newest = max(map(checkpoint_number, self.names()), default=0)
        pending = []
        for name in local_names(self._folder):
            if checkpoint_number(name) > newest and not self._is_uploaded(name):
                try:
                    pending.append(read_checkpoint(self._folder / name))
                except CorruptCheckpointError as error:
                    self._report(f"{error}. Its upload was interrupted, and it was skipped")
        best = None
        with contextlib.suppress(OSError):
            best = read_pointer(self._folder, BEST)
        for checkpoint in reversed(pending):
            name = checkpoint.path.name
            if name == best:
                self.note_best(name, checkpoint.manifest.metrics)
            if name == best or checkpoint is pending[0]:
                self._upload(name)
                self._report(f"{name} was uploaded to {self.url}: an earlier run was interrupted in that")

    def fetch(self, name: str, *, verify: bool = True, checksum: str | None = None) -> Checkpoint:
        """Return the checkpoint `name`, downloaded unless there is a local copy already. Once for all ranks of a node.

        `checksum`: that of the manifest; a copy with it is used without any request. Raises CorruptCheckpointError if
        it is not complete at the URL.
        """
        with _locked(self._folder):
            copy = self._copy(name, verify=verify)
            if copy is not None and checksum == copy.manifest.checksum:
                return copy
            manifest = self._manifest(name)
            if copy is not None and copy.manifest.checksum == manifest.checksum:
                return copy
            downloaded = self._download(name, manifest)
            self._remove_copies(self.names())
            return downloaded

    def best(self) -> str | None:
        """Return the name of the best checkpoint; None if there is none."""
        name = (self._store.read(BEST) or "").strip()
        return name if CHECKPOINT_NAME.fullmatch(name) else None

    def note_best(self, name: str, metrics: Mapping[str, float]) -> None:
        """Make `name`, which is not uploaded yet, the best checkpoint once it is."""
        self._best, self.best_metrics = name, metrics

    def set_aside(self) -> str | None:
        """Exclude all checkpoints at the URL from resuming and pruning, by a file that lists them; return its URL.

        Nothing is copied. None if there are none.
        """
        files = self._store.list()
        complete = self._complete(files)
        self._best, self.best_metrics = "", {}
        self._remove_copies([])
        if not complete:
            return None
        number = 1
        while f"{_EARLIER}{number}" in files:
            number += 1
        self._store.write(f"{_EARLIER}{number}", "".join(f"{name}\n" for name in complete))
        self._store.remove(BEST)
        return f"{self.url}/{_EARLIER}{number}"

    def close(self) -> bool:
        """Wait for all uploads and end the claim. True if everything is uploaded; failures are reported."""
        is_done = self.uploads.drain()
        failed = self.uploads.failed
        for name, error in failed.items():
            then = "; the next run that resumes with this staging directory uploads it" if name == max(failed) else ""
            self._report(f"{name} is not in {self.url}: {error.found}. It is in {self._folder / name}{then}")
        if self._token and is_done:
            with contextlib.suppress(CheckpointError):  # the claim is then reported by the next run
                if self._claimed_by().get("token") == self._token:
                    self._store.remove(_WRITER)
        self._token = ""
        return is_done

    def _claim(self, report: Callable[[str], None]) -> None:
        token = secrets.token_hex(8)
        owner = self._claimed_by()
        own = {"process": os.getpid(), "host": socket.gethostname()}
        if owner and {key: owner.get(key) for key in own} != own:
            report(
                f"{_describe(owner)} wrote checkpoints to {self.url} and did not end properly. If it is still "
                "running, its next upload will be refused: this run writes there from now on"
            )
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._store.write(_WRITER, json.dumps({"token": token, **own, "since": since}) + "\n")
        self._token = token

    def _claimed_by(self) -> dict[str, object]:
        try:
            return dict(json.loads(self._store.read(_WRITER) or "{}"))
        except (ValueError, TypeError):
            return {"process": "of unknown number"}

    def _check_claim(self) -> None:
        if not self._token:
            self._claim(self.uploads.note)
        owner = self._claimed_by()
        if owner and owner.get("token") != self._token:
            raise CheckpointError(
                f"uploading checkpoints to {self.url}",
                found=f"a different run has started to write there: {_describe(owner)}",
                fix="Use a URL for each run.",
            )

    def _upload(self, name: str) -> None:
        self._check_claim()
        local = self._folder / name
        try:
            manifest = parse_manifest((local / FILE_NAME).read_text(encoding="utf-8"), where=str(local))
        except OSError as error:
            raise CheckpointError(f"uploading {local}", found=f"{FILE_NAME} cannot be read ({error})") from error
        self._remove_interrupted(name)
        for file in manifest.files:
            self._store.put(local / file, f"{name}/{file}")
        there = self._store.list(name)
        for file, facts in manifest.files.items():
            size = there.get(f"{name}/{file}")
            if size != facts.num_bytes:
                found = f"it has {size} bytes there, not {facts.num_bytes}" if size is not None else "it is not there"
                fix = "The checkpoint was not completed there."
                raise CheckpointError(f"uploading {local / file} to {self.url}/{name}/{file}", found=found, fix=fix)
        self._check_claim()
        self._store.put(local / FILE_NAME, f"{name}/{FILE_NAME}")
        self._after_upload(name)

    def _after_upload(self, name: str) -> None:
        with contextlib.suppress(OSError):  # it is compared with the URL then
            (self._folder / name / _UPLOADED).touch()
        self.last_number = max(self.last_number, checkpoint_number(name))
        try:
            if name == self._best:
                self._store.write(BEST, f"{name}\n")
            self._prune()
        except CheckpointError as error:
            self.uploads.note(f"{name} was uploaded, but {error}")
        for copy in self._own:
            if copy != name and self._is_uploaded(copy):
                shutil.rmtree(self._folder / copy, ignore_errors=True)
        self._own = [name]

    def _prune(self) -> None:
        if self._keep is None:
            return
        files = self._store.list()
        if old := self._complete(files)[self._keep :]:
            spared = (self._best, self.best())
            for name in old:
                if name not in spared:
                    self._remove(name, files)

    def _remove_interrupted(self, name: str) -> None:
        files = self._store.list()
        for folder, is_complete in _folders(files).items():
            if not is_complete and folder != name:
                self._remove(folder, files)

    def _remove(self, name: str, files: Mapping[str, int]) -> None:
        manifest = f"{name}/{FILE_NAME}"  # first: without it, the rest is not a checkpoint
        for file in sorted((file for file in files if file.startswith(f"{name}/")), key=lambda file: file != manifest):
            self._store.remove(file)
        self._store.remove_folder(name)

    def _complete(self, files: Mapping[str, int]) -> list[str]:
        aside = {
            name
            for file in files
            if file.startswith(_EARLIER) and file.removeprefix(_EARLIER).isdecimal()
            for name in (self._store.read(file) or "").split()
        }
        names = [name for name, is_complete in _folders(files).items() if is_complete and name not in aside]
        return sorted(names, key=checkpoint_number, reverse=True)

    def _manifest(self, name: str) -> Manifest:
        text = self._store.read(f"{name}/{FILE_NAME}")
        if text is None:
            found = f"it has no {FILE_NAME}: its upload was interrupted, or it is not a checkpoint"
            raise CorruptCheckpointError(f"reading {self.url}/{name}", found=found)
        return parse_manifest(text, where=f"{self.url}/{name}")

    def _copy(self, name: str, *, verify: bool) -> Checkpoint | None:
        with contextlib.suppress(CorruptCheckpointError):
            return read_checkpoint(self._folder / name, verify=verify)
        return None

    def _is_uploaded(self, name: str) -> bool:
        return (self._folder / name / _UPLOADED).exists()

    def _keep_lost(self, complete: list[str]) -> None:
        """Move copies aside if all checkpoints at the URL were deleted: they may be the last ones. Reported."""
        copies = local_names(self._folder)
        if complete or not any(map(self._is_uploaded, copies)):
            return
        with contextlib.suppress(OSError):
            moved = move_aside(self._folder, copies)
            self._report(
                f"the checkpoints in {self.url} were deleted, so the run begins again; copies of this machine, of "
                f"{', '.join(copies)}, were moved to {moved}"
            )

    def _remove_copies(self, complete: list[str]) -> None:
        """Delete local copies of checkpoints that were uploaded and are not among `complete`: deleted at the URL."""
        for name in local_names(self._folder):
            if name not in complete and self._is_uploaded(name):
                shutil.rmtree(self._folder / name, ignore_errors=True)

    def _download(self, name: str, manifest: Manifest) -> Checkpoint:
        where, target = f"{self.url}/{name}", self._folder / name
        try:
            with staging(self._folder, f"{STAGING_PREFIX}{name}-") as made:
                for file, facts in manifest.files.items():
                    if Path(file).name != file:
                        raise CorruptCheckpointError(f"reading {where}", found=f"{file!r} is outside of it")
                    if not self._store.get(f"{name}/{file}", made / file):
                        raise CorruptCheckpointError(f"reading {where}", found=f"{file} is missing")
                    if read_facts(made / file) != facts:
                        found = f"{file} was changed: its size or checksum does not match"
                        raise CorruptCheckpointError(f"reading {where}", found=found)
                (made / FILE_NAME).write_text(manifest.render(), encoding="utf-8")
                (made / _UPLOADED).touch()
                shutil.rmtree(target, ignore_errors=True)  # damaged, or of a different run
                publish(made, name)
        except OSError as error:
            raise CheckpointError(
                f"downloading {where} to {self._folder}",
                found=f"{error.strerror or error} ({type(error).__name__})",
                fix="Free some space, or choose a different `staging_dir`.",
            ) from error
        return read_checkpoint(target, verify=False)


def _folders(files: Mapping[str, int]) -> dict[str, bool]:
    """Return the names of folders of checkpoints, and if each has a manifest."""
    found: dict[str, bool] = {}
    for file in files:
        name, _, rest = file.partition("/")
        if rest and CHECKPOINT_NAME.fullmatch(name):
            found[name] = found.get(name, False) or rest == FILE_NAME
    return found


def _describe(owner: Mapping[str, object]) -> str:
    return f"process {owner.get('process')} on {owner.get('host', 'an unknown host')}, since {owner.get('since')},"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclude other processes of this machine that download to `folder`, where its file system has locks."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _FETCHING, "ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
