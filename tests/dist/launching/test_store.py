# SPDX-License-Identifier: Apache-2.0
"""The store process of a launch."""

from __future__ import annotations

import os
import time

import psutil
import pytest

import ddpilot


def kill_store() -> None:
    """Rank 0 kills the process that listens on the launch's port; all ranks would then wait for ever."""
    group = ddpilot.init_group()
    group.barrier()
    if group.rank == 0:
        port = int(os.environ["MASTER_PORT"])
        for process in psutil.Process().parent().children():  # type: ignore[union-attr]
            if any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in process.net_connections()):
                process.kill()
    time.sleep(60)


def test_launch_says_that_the_store_process_died() -> None:
    """A launch ends at once when its store is gone; the ranks would wait for half an hour."""
    start = time.monotonic()
    with pytest.raises(ddpilot.LaunchError, match=r"the process of its store was killed by SIGKILL"):
        ddpilot.launch(kill_store, nproc_per_node=2)
    assert time.monotonic() - start < 30
