# SPDX-License-Identifier: Apache-2.0
"""URLs are told from paths, and what is missing for one is said before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.checkpoint.remote.store import RemoteStore, check_backend, is_url, staging_folder, without_password
from ddpilot.errors import CheckpointError


def test_is_url_tells_urls_from_paths() -> None:
    """Paths stay paths; a URL that lost a slash is refused."""
    assert is_url("s3://bucket/run7")
    assert is_url(" gs://bucket\n")
    for path in ("ckpt", "/a/b", "a::b", "C:/x", "s3:/bucket", Path("a/b"), None):
        assert not is_url(path)
    with pytest.raises(CheckpointError, match="Pass the URL as a string"):
        is_url(Path("s3://bucket/run7"))


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("s3://", "directory s3://: the URL names no bucket"),
        ("s33://bucket/x", "knows no file system for s33://"),
        ("dropbox://folder/x", "needs the package dropboxdrivefs for dropbox://"),
    ],
)
def test_check_backend_says_what_is_missing(url: str, found: str) -> None:
    """The error comes from the constructor, before a file is written."""
    with pytest.raises(CheckpointError, match=found):
        CheckpointDir(url)


def test_check_backend_knows_fsspecs_own() -> None:
    """Nothing has to be installed for these."""
    check_backend("memory://x/y")
    check_backend("file:///tmp/x")


def test_staging_folder_is_one_for_each_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Argument, environment variable, cache of the user, in that order; no password in its name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DDPILOT_STAGING_DIR", raising=False)
    one = staging_folder("s3://bucket/my run/7", None)
    assert one.parent == tmp_path / "cache" / "ddpilot" / "checkpoints"
    assert one.name.startswith("bucket-my-run-7-")
    assert one != staging_folder("s3://bucket/my-run/7", None)
    monkeypatch.setenv("DDPILOT_STAGING_DIR", str(tmp_path / "scratch"))
    assert staging_folder("s3://b/7", None).parent == tmp_path / "scratch"
    assert staging_folder("s3://b/7", tmp_path).parent == tmp_path
    assert "secret" not in staging_folder("ftp://me:secret@host/x", tmp_path).name
    assert without_password("ftp://me:secret@host/x") == "ftp://me:***@host/x"


def test_staging_dir_without_url_is_refused(tmp_path: Path) -> None:
    """It would have no effect."""
    with pytest.raises(CheckpointError, match="is not a URL"):
        CheckpointDir(tmp_path / "ckpt", staging_dir=tmp_path)


def test_errors_name_the_file_and_the_url(tmp_path: Path) -> None:
    """Also those of a kind that only the backend knows."""
    store = RemoteStore(f"file://{tmp_path}/far")
    assert store.list() == {}
    assert store.read("nothing") is None
    store.write("a/b.txt", "text")
    assert store.list() == {"a/b.txt": 4}
    assert store.list("a") == {"a/b.txt": 4}
    with pytest.raises(CheckpointError, match=f"uploading {tmp_path}/none to file://{tmp_path}/far/x: .*FileNotFound"):
        store.put(tmp_path / "none", "x")
    with pytest.raises(CheckpointError, match="file://.*/far/a: Is a directory|directory"):
        store.write("a", "text")
