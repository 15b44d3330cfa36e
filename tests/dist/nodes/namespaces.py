# SPDX-License-Identifier: Apache-2.0
"""Two nodes on one machine: network namespaces with an address each, joined by a cable that can be cut."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.dist.forked import start_forked

OURS = (sys.executable, "-m", "ddpilot")
DDPILOT = (*OURS, "run")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_GONE_S = 10.0


def ip(*words: str) -> str:
    """The output of `ip`; RuntimeError with its message if it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@dataclass
class Agent:
    """A launcher in one namespace, and what it has printed so far."""

    process: subprocess.Popen[str]
    name: str
    describe_all: Callable[[], str] = str
    """What is shown where this one does not do what it should: of all nodes, since the reason may be elsewhere."""
    start_s: float = field(default_factory=time.monotonic)
    text: str = ""
    times_s: list[tuple[float, str]] = field(default_factory=list)

    def read_all(self) -> None:
        """Take what is printed, to the end; runs in a thread."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.times_s.append((time.monotonic() - self.start_s, line))
            self.text += line

    def wait_for(self, said: str, limit_s: float) -> float:
        """Seconds since the start at which `said` had been printed; fails the test after `limit_s` seconds."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            for at_s, line in list(self.times_s):
                if said in line:
                    return at_s
            if self.process.poll() is not None and said not in self.text:
                time.sleep(0.2)  # its last lines
                break
            time.sleep(0.02)
        if said in self.text:
            return time.monotonic() - self.start_s
        pytest.fail(f"{self.name} never said {said!r} in {limit_s:g} s:\n{self.describe_all()}", pytrace=False)

    def wait(self, limit_s: float) -> int:
        """The exit status; fails the test after `limit_s` seconds."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.name} did not end in {limit_s:g} s:\n{self.describe_all()}", pytrace=False)


class TwoNodes:
    """Namespaces "a" and "b". Whatever was started in them is killed by `close`, in them and nowhere else."""

    def __init__(self) -> None:
        unique = uuid.uuid4().hex[:6]
        self._names = {node: f"ddp{unique}{node}" for node in "ab"}
        self.addresses = {"a": "10.78.0.1", "b": "10.78.0.2"}  # seen by these two alone
        self.interfaces = {node: f"v{unique}{node}" for node in "ab"}
        self.forks_ranks = True
        """Whether the ranks of `ddpilot run` are forked. A stack that is shown of one then begins in the tests."""
        self._agents: list[tuple[Agent, threading.Thread]] = []

    def open(self) -> None:
        """Make the namespaces and the cable."""
        for name in self._names.values():
            ip("netns", "add", name)
        a, b = (self.interfaces[node] for node in "ab")
        ip("link", "add", a, "netns", self._names["a"], "type", "veth", "peer", b, "netns", self._names["b"])
        for node in "ab":
            ip("-n", self._names[node], "addr", "add", f"{self.addresses[node]}/24", "dev", self.interfaces[node])
            for interface in ("lo", self.interfaces[node]):
                ip("-n", self._names[node], "link", "set", interface, "up")
        for node in "ab":
            self._await_up(node)

    def _await_up(self, node: str) -> None:
        """The kernel looks at new cables once a second at most; until then the interface counts as down."""
        name, interface = self._names[node], self.interfaces[node]
        deadline_s = time.monotonic() + _GONE_S
        while " state UP " not in (seen := ip("-n", name, "link", "show", "dev", interface)):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{interface} did not come up in {_GONE_S:g} s: {seen}")
            time.sleep(0.01)

    def cut(self) -> None:
        """Pull the cable out."""
        ip("-n", self._names["a"], "link", "set", self.interfaces["a"], "down")

    def mend(self) -> None:
        """Put the cable in again."""
        ip("-n", self._names["a"], "link", "set", self.interfaces["a"], "up")

    def start(self, node: str, command: Sequence[object], **environ: str) -> Agent:
        """Start `command` in a namespace, with its output in one stream."""
        words = list(map(str, command))
        full = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        if words[:3] in ([*TORCHRUN], [*OURS]):
            streams |= {"stdin": subprocess.DEVNULL, "forks_ranks": self.forks_ranks}
            process = start_forked(words, full, namespace=self._names[node], **streams)
        else:
            words = ["ip", "netns", "exec", self._names[node], *words]
            process = subprocess.Popen(words, env=full, text=True, **streams)
        agent = Agent(process, f"node {node}", self.describe)
        reader = threading.Thread(target=agent.read_all, daemon=True)
        reader.start()
        self._agents.append((agent, reader))
        return agent

    def describe(self) -> str:
        """What each launcher has printed last, and the connections of each node."""
        parts = []
        for agent, _ in self._agents:
            end = agent.process.poll()
            state = "runs" if end is None else f"ended with {end}"
            parts += [f"--- {agent.name} ({state})", *agent.text.splitlines()[-40:]]
        for node, name in self._names.items():
            words = ["ip", "netns", "exec", name, "ss", "-Htanp"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
            parts += [f"--- connections of node {node}", done.stdout + done.stderr]
        return "\n".join(parts)

    def pids(self) -> list[int]:
        """Every process in the namespaces."""
        found: list[int] = []
        for name in self._names.values():
            done = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, timeout=20, check=False
            )
            found += map(int, done.stdout.split())
        return found

    def close(self) -> list[int]:
        """Kill and remove everything; returns the pids that were left though their launcher had ended."""
        launchers = [agent.process.pid for agent, _ in self._agents if agent.process.poll() is None]
        deadline_s = time.monotonic() + 2.0
        while not launchers and self.pids() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        left = [] if launchers else self.pids()
        deadline_s = time.monotonic() + _GONE_S
        while (pids := self.pids()) and time.monotonic() < deadline_s:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)
        for agent, reader in self._agents:
            agent.process.wait(_GONE_S)
            reader.join(_GONE_S)
            if agent.process.stdout is not None:
                agent.process.stdout.close()
        for name in self._names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)
        return left


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Two nodes for one test; skips it, with the reason, where this user may not make namespaces."""
    if shutil.which("ip") is None:
        pytest.skip("two nodes need `ip` (package iproute2), which is not installed")
    nodes = TwoNodes()
    try:
        nodes.open()
    except RuntimeError as error:
        nodes.close()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        yield nodes
    except BaseException:
        nodes.close()
        raise
    left = nodes.close()
    assert not left, f"both launchers had ended, and these processes of theirs were left: {left}"


def example() -> Path:
    """The training script that both nodes run."""
    return Path(__file__).parents[3] / "examples" / "raw_ddp.py"
