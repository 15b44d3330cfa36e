# SPDX-License-Identifier: Apache-2.0
"""One of several processes that need a file downloads it."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpilot.environments.private_files import own_temporary_folder
from ddpilot.integrations.fastai.learners import download_once, one_at_a_time, untar_once


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Locks are created in the test's folder, and removed."""
    folder = tmp_path / "locks"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.rglob("*.lock"))


def test_one_at_a_time_lets_a_second_one_in_after_the_first() -> None:
    """What is inside never overlaps, also when a waiting one gets the lock of a file that was just removed."""
    inside, most = [0], [0]
    barrier = threading.Barrier(4)

    def enter() -> None:
        barrier.wait()
        for _ in range(5):
            with one_at_a_time("https://example.org/data.tgz"):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_one_at_a_time_lets_different_files_in_together() -> None:
    """Two downloads of different things do not wait for each other."""
    with one_at_a_time("a"), one_at_a_time("b"):
        pass


def test_one_at_a_time_takes_no_lock_if_the_folder_belongs_to_a_different_user(own_folder: Path) -> None:
    """Another user can take its name, and a download does not fail of that."""
    own_temporary_folder().touch()
    entered = []
    with one_at_a_time("a"):
        entered.append("a")
    assert entered == ["a"]
    assert [path.name for path in own_folder.iterdir()] == [own_temporary_folder().name]


def test_download_once_skips_files_that_a_different_rank_has_downloaded(tmp_path: Path) -> None:
    """The second one finds the file that it would have loaded."""
    calls: list[str] = []

    def download(url: str, dst: str, **_options: object) -> None:
        calls.append(url)
        Path(dst).write_text("weights")

    for _ in range(2):
        download_once(download, "https://example.org/w.pth", str(tmp_path / "w.pth"), hash_prefix=None)
    assert calls == ["https://example.org/w.pth"]


def test_untar_once_returns_where_the_data_are(tmp_path: Path) -> None:
    """fastai itself finds out whether they are there already."""
    assert untar_once(lambda url, force_download: tmp_path / url, "data", force_download=True) == tmp_path / "data"
