# SPDX-License-Identifier: Apache-2.0
"""Limits of memory, files and cores: each check passes here, and fails for real limits and for a container's files."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from ddpilot.diagnose.checks import limits
from tests.unit.diagnose.checking import make_facts, statuses, text_of

GB = 1_000_000_000


def make_root(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A root folder with /proc/self/cgroup and the files of its cgroups."""
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_shared_memory_is_compared_with_what_the_loaders_workers_need() -> None:
    """2 ranks x 2 workers x 2 batches of 20 MB; no workers need nothing."""
    assert statuses(limits.shared_memory, make_facts()) == ["ok"]
    assert "need 160.0 MB" in text_of(limits.shared_memory, make_facts())
    assert "need" not in text_of(limits.shared_memory, make_facts(num_workers=0))
    assert statuses(limits.shared_memory, make_facts(num_workers=10**9)) == ["error DDP601"]


def test_shared_memory_is_a_warning_when_there_is_none(tmp_path: Path) -> None:
    """A machine without /dev/shm."""
    assert statuses(limits.shared_memory, make_facts(root=tmp_path)) == ["warning DDP601"]


def test_locked_memory_is_enough_when_it_is_unlimited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a card; raising the limit needs rights that a test may not have."""
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert text_of(limits.locked_memory, make_facts(root=tmp_path)) == "unlimited"


@pytest.mark.parametrize(
    ("cgroup", "file", "text"),
    [
        ("0::/job\n", "sys/fs/cgroup/job/memory.max", "900000000\n"),
        ("0::/job/step\n", "sys/fs/cgroup/job/memory.max", "900000000\n"),
        ("4:memory:/job\n", "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "900000000\n"),
        ("4:cpu,memory:/not/shown/here\n0::/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes", "900000000\n"),
    ],
)
def test_memory_reads_the_lowest_limit_of_the_cgroups(tmp_path: Path, cgroup: str, file: str, text: str) -> None:
    """Versions 1 and 2, in the process's own cgroup, around it, and as a container shows it."""
    root = make_root(tmp_path, cgroup, {file: text})
    found = text_of(limits.memory, make_facts(root=root))
    assert "this cgroup may use 900.0 MB; 2 ranks with 2 workers each need about 2.0 GB" in found
    assert statuses(limits.memory, make_facts(root=root)) == ["warning DDP702"]


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n", f"{100 * GB}\n", "nonsense\n"])
def test_memory_is_enough_without_a_limit_that_binds(tmp_path: Path, text: str) -> None:
    """No limit in either version's spelling, a high one, and a file that cannot be read."""
    root = make_root(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": text})
    assert statuses(limits.memory, make_facts(root=root, nproc_per_node=1, num_workers=0)) == ["ok"]


def test_cores_are_those_of_the_quota(tmp_path: Path) -> None:
    """Half a core in a container: two ranks are too many, in version 2 and in version 1."""
    for cgroup, files in (
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}),
        (
            "3:cpu,cpuacct:/job\n",
            {
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
        ),
    ):
        root = make_root(tmp_path / cgroup[0], cgroup, files)
        assert statuses(limits.cores, make_facts(root=root)) == ["warning DDP804"]
        assert "0.5 cores (quota of the cgroup); 2 ranks" in text_of(limits.cores, make_facts(root=root))


def test_cores_are_enough_for_one_thread_per_rank() -> None:
    """One rank without workers fits; threads and workers of every rank count."""
    one = {"nproc_per_node": 1}
    assert statuses(limits.cores, make_facts(**one)) == ["ok"]
    threads = make_facts(**one, environ={"OMP_NUM_THREADS": "4000"})
    assert statuses(limits.cores, threads) == ["warning DDP804"]
    assert "`export OMP_NUM_THREADS=" in text_of(limits.cores, threads)
    assert statuses(limits.cores, make_facts(**one, num_workers=4000)) == ["warning DDP804"]
