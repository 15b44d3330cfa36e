# SPDX-License-Identifier: Apache-2.0
"""Ranks that write into one directory: what rank 0 learns of each, and what is left of a rank that failed or died."""

from __future__ import annotations

import errno
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest

from ddpilot.checkpoint.atomic_files import FileFacts, RankWrite, collect, shard_owner


def write_file(path: Path, error: Exception | None = None) -> tuple[dict[str, FileFacts], Any]:
    """Write a file of shards, and raise `error` after that."""
    path.write_text("shards")
    if error is not None:
        raise error
    return {path.name: FileFacts(6, "sum")}, [path.name]


def test_collect_returns_what_each_rank_has_written_and_removes_its_notes(tmp_path: Path) -> None:
    """In the order of ranks; only their files are left."""
    for rank in (2, 1):
        write = functools.partial(write_file, tmp_path / f"__{rank}_0.distcp")
        RankWrite(tmp_path, rank).start(write).result()
    found = list(collect(tmp_path, 3, pickle.load))
    assert [files for files, _ in found] == [{f"__{rank}_0.distcp": FileFacts(6, "sum")} for rank in (1, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["__1_0.distcp", "__2_0.distcp"]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OSError, "rank 1: No space left on device"),
        (ValueError("a plan that does not fit"), RuntimeError, "rank 1: ValueError: a plan that does not fit"),
    ],
)
def test_collect_raises_the_error_of_a_rank_whose_files_are_gone(
    tmp_path: Path, error: Exception, kind: type[Exception], message: str
) -> None:
    """The number of the error stays, by which a full disk is recognised."""
    RankWrite(tmp_path, 1).run(lambda: write_file(tmp_path / "__1_0.distcp", error))
    with pytest.raises(kind, match=message) as raised:
        list(collect(tmp_path, 2, pickle.load))
    assert getattr(raised.value, "errno", None) == getattr(error, "errno", None)
    assert not (tmp_path / "__1_0.distcp").exists()


def test_collect_gives_up_a_rank_whose_lock_is_released_without_a_note(tmp_path: Path) -> None:
    """As the kernel releases it when the rank dies."""
    RankWrite(tmp_path, 1).release()
    with pytest.raises(OSError, match="rank 1 ended while it wrote its shards"):
        list(collect(tmp_path, 2, pickle.load))


def test_shard_owner_is_in_the_name() -> None:
    """Other files have none."""
    assert [shard_owner(name) for name in ("__12_0.distcp", "state.pt", "x__1_0.distcp")] == [12, None, None]
