# SPDX-License-Identifier: Apache-2.0
"""`SshCluster`: hosts that the OpenSSH client starts. Its connection is the node's, so nothing listens anywhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ddpilot.session.nodes import commands
from ddpilot.session.nodes.node import Node, StartProcess
from ddpilot.session.nodes.node_ranks import START_LIMIT_S

_MAX_THREADS = 32


class SshCluster:
    """The machines named `hosts`, as `ssh` takes them."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(hosts)
        self._nodes: list[Node] = []

    def _start(self, name: str, number: int, directory: str) -> StartProcess:
        line = commands.first_line(node_rank=number, num_nodes=len(self._hosts), directory=directory)
        return StartProcess(commands.ssh_command(name), line, keeps_pipes=True)

    def reopen(self, node: Node, directory: str) -> None:
        """Start the host of a lost node again."""
        node.starter.close(0.0)
        node.starter = self._start(node.name, node.node_rank, directory)
        node.open_pipes(time.monotonic() + START_LIMIT_S)

    def open(self, directory: str) -> list[Node]:
        """Start a host on each machine."""
        deadline_s = time.monotonic() + START_LIMIT_S
        for number, name in enumerate(self._hosts):
            self._nodes.append(Node(name, number, self._start(name, number, directory)))
        try:
            with ThreadPoolExecutor(min(_MAX_THREADS, len(self._nodes))) as pool:
                for done in [pool.submit(node.open_pipes, deadline_s) for node in self._nodes]:
                    done.result()
        except BaseException:
            for node in self._nodes:
                node.close(is_killed=True)
            self.close()
            raise
        return self._nodes

    def describe_job_end(self) -> str:
        """Return "": there is no job."""
        return ""

    def close(self) -> None:
        """Wait for the ends of the ssh processes."""
        for node in self._nodes:
            node.starter.close(1.0)
