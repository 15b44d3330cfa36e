# SPDX-License-Identifier: Apache-2.0
"""Launching from threads, and from a fork of a process that launched."""

from __future__ import annotations

import os

import ddpilot
from ddpilot import Launcher


def test_launch_works_from_threads() -> None:
    """From a thread, and from two at once: each gets its own ranks' values."""
    from concurrent.futures import ThreadPoolExecutor

    def where(number: int) -> tuple[int, str]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()
        return number, os.environ["MASTER_PORT"]

    launcher = Launcher(nproc_per_node=2, output="silent", timeout_s=60)
    with ThreadPoolExecutor(3) as pool:
        values = [list(results) for results in pool.map(lambda number: launcher.run(where, number), range(3))]
    assert [[number for number, _ in pair] for pair in values] == [[0, 0], [1, 1], [2, 2]]
    assert len({pair[0][1] for pair in values}) == 3


def test_launch_works_in_a_forked_child_of_the_parent() -> None:
    """The child does not use its parent's server; the parent's still works afterwards."""
    before = ddpilot.launch(os.getppid, nproc_per_node=1)[0]
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        try:
            server = ddpilot.launch(os.getppid, nproc_per_node=1)[0]
            os.write(writer, str(server).encode())
            from ddpilot.launching.rank_server.client import stop_servers

            stop_servers()
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as answer:
        server = answer.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert int(server) != before
    assert ddpilot.launch(os.getppid, nproc_per_node=1)[0] == before
