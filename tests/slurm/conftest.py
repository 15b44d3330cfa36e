# SPDX-License-Identifier: Apache-2.0
"""One real Slurm of four nodes for each file of tests in this folder; skipped, with the reason, where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, running_cluster, why_not


@pytest.fixture(scope="module")
def cluster_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The Slurm of this file's tests; use `cluster`."""
    if reason := why_not():
        pytest.skip(reason)
    with running_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def cluster(cluster_of_module: Cluster, no_leaks: None) -> Iterator[Cluster]:
    """A Slurm whose nodes are idle before and after the test."""
    yield cluster_of_module
    cluster_of_module.cancel_all()
