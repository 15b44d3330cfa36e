# SPDX-License-Identifier: Apache-2.0
"""A job whose task the kernel kills for its memory, on a real Slurm with cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import CGROUPS, Cluster, why_not
from tests.slurm.jobs import DDPILOT, PYTHON

EAT = """
held = []
for _ in range(60):
    held.append(bytearray(10 << 20))
print("full", flush=True)
"""


@pytest.fixture
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm of one node that limits memory."""
    if reason := why_not():
        pytest.skip(reason)
    if not (CGROUPS / "memory" / "memory.limit_in_bytes").exists():
        pytest.skip("this machine has no memory cgroup of version 1, with which the test's Slurm limits memory")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), num_nodes=1, limits_memory=True)
    try:
        cluster.open()
        yield cluster
    finally:
        cluster.close()


def test_end_names_memory(limited: Cluster, tmp_path: Path) -> None:
    """600 MB in a job that asked for 200; one that asked for enough ends well."""
    (tmp_path / "train.py").write_text(EAT)
    done = limited.run(*DDPILOT, "train.py", *PYTHON, "--mem=200M", cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert "OUT_OF_MEMORY): it used more memory than it had asked for, and the kernel killed" in done.stderr
    assert "task 0 on n1: out of memory" in done.stderr
    assert "full" not in done.stdout.partition("\n\n")[2].splitlines()
    done = limited.run(*DDPILOT, "train.py", *PYTHON, "--mem=1G", cwd=tmp_path)
    assert "full" in done.stdout.splitlines()
