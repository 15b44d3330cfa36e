# SPDX-License-Identifier: Apache-2.0
"""One process that has imported torch forks the ranks of a whole file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.group.ranks import RunRanks, fork_server


@pytest.fixture(scope="module")
def run_ranks() -> Iterator[RunRanks]:
    """Runs a body of the folder bodies on real ranks."""
    with fork_server() as run:
        yield run
