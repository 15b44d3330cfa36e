# SPDX-License-Identifier: Apache-2.0
"""Start the host processes of a session: `ssh` on each node, or `srun` in an allocation of Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import psutil

from ddpilot.environments.variables import is_loopback
from ddpilot.errors import LaunchError
from ddpilot.launching.rank_environment import python_command
from ddpilot.module_names import SESSION_HOST
from ddpilot.session.nodes.node import Node, StartProcess
from ddpilot.session.nodes.node_ranks import START_LIMIT_S, Cluster
from ddpilot.session.nodes.tls import CANNOT_CONNECT, TlsListener
from ddpilot.session.options import SessionOptions
from ddpilot.slurm.records import parse_lost_nodes

SSH_VARIABLE = "DDPILOT_SSH"
"""The command to use in place of `ssh`, with options, such as "ssh -F my_config"."""

_SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15")


def host_command() -> list[str]:
    """Return the command line of a host process: this interpreter, with this one's module path."""
    return python_command(f"sys.argv[:] = ['ddpilot']; from {SESSION_HOST} import main; main()")


def ssh_command(host: str) -> list[str]:
    """Return the command that starts a host process on `host`."""
    ssh = shlex.split(os.environ.get(SSH_VARIABLE) or "ssh")
    return [*ssh, *_SSH_OPTIONS, "--", host, f"exec {shlex.join(host_command())}"]


def srun_command(num_nodes: int, options: Sequence[str]) -> list[str]:
    """Return the command that starts one host process on each node of an allocation, as a step of its own.

    `--overlap`: the step may share CPUs with the step in which the notebook itself may run. A node that fails must not
    end the step, as the ranks of the others keep their variables.
    """
    return [
        "srun",
        *options,
        f"--nodes={num_nodes}",
        f"--ntasks={num_nodes}",
        "--ntasks-per-node=1",
        "--overlap",
        "--cpu-bind=none",
        "--export=ALL",
        "--kill-on-bad-exit=0",
        "--no-kill",
        "--unbuffered",
        "--job-name=ddpilot-session",
        *host_command(),
    ]


def first_line(
    *,
    node_rank: int | None,
    num_nodes: int,
    directory: str,
    port: int | None = None,
    certificate: str = "",
    keys: Sequence[str] = (),
) -> bytes:
    """Return the line for the standard input of a host. `port`: where the parent listens; None over ssh."""
    given: dict[str, Any] = {
        "node_rank": node_rank,
        "num_nodes": num_nodes,
        "directory": directory,
        "port": port,
        "addresses": own_addresses() if port is not None else [],
        "certificate": certificate,
        "keys": list(keys),
    }
    return json.dumps(given).encode() + b"\n"


def own_addresses() -> list[str]:
    """Return the IPv4 addresses at which nodes may reach this machine, loopback last."""
    stats = psutil.net_if_stats()
    found = [
        each.address
        for name, addresses in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup
        for each in addresses
        if each.family == socket.AF_INET
    ]
    return sorted(dict.fromkeys(found), key=is_loopback)


_MAX_THREADS = 32


class SshCluster:
    """The machines named `hosts`, as `ssh` takes them."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(hosts)
        self._nodes: list[Node] = []

    def _start(self, name: str, number: int, directory: str) -> StartProcess:
        line = first_line(node_rank=number, num_nodes=len(self._hosts), directory=directory)
        return StartProcess(ssh_command(name), line, keeps_pipes=True)

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
        """Return an empty string, because there is no job."""
        return ""

    def close(self) -> None:
        """Wait for the ends of the ssh processes."""
        for node in self._nodes:
            node.starter.close(1.0)


_JOB_ID = re.compile(r"(?:Pending|Granted) job allocation (\d+)")
_GRANTED = re.compile(r"Granted job allocation \d+")
_LAUNCH_FAILED = re.compile(r"Task launch .*failed on node \S+: (.+)")
_REASON_EVERY_S = 1.0
_COMMAND_LIMIT_S = 15.0
_POLL_S = 0.05
_END_LIMIT_S = 3.0
_ENDS = {
    "CANCELLED": "was cancelled",
    "TIMEOUT": "has reached its time limit",
    "PREEMPTED": "was preempted",
    "NODE_FAIL": "has lost a node",
    "OUT_OF_MEMORY": "ran out of memory",
    "DEADLINE": "has reached its deadline",
    "FAILED": "has failed",
    "COMPLETED": "is over",
    "COMPLETING": "is being ended by Slurm",
}
"""By the job's state, how a sentence about lost ranks says why."""
_END_REASONS = {"TimeLimit": "TIMEOUT", "NodeDown": "NODE_FAIL", "OutOfMemory": "OUT_OF_MEMORY"}
"""By Slurm's reason, the state that follows: while the job is being ended, its state is COMPLETING."""
_NODE_DOWN_FIX = (
    "Try again once `sinfo --nodes={node}` shows it as allocated; `%ddp stop`, then `%ddp start --slurm` takes other "
    "nodes. Until then cells run on the other ranks"
)
_REOPEN_LIMIT_S = 30


@dataclass(frozen=True, kw_only=True)
class SlurmRequest:
    """Options of a session on Slurm. If `num_nodes` is None, all nodes of the allocation, or one node of a new one."""

    num_nodes: int | None = None
    gpus_per_node: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    """More options of `salloc`, such as {"time": "2:00:00"}; the value "" is for options without one."""

    def words(self) -> list[str]:
        """Return the options for the command line."""
        gpus = [] if self.gpus_per_node is None else [f"--gpus-per-node={self.gpus_per_node}"]
        return [*gpus, *(f"--{name}={value}" if value else f"--{name}" for name, value in self.options.items())]


class SlurmCluster:
    """The nodes of one allocation. `note` shows what the session waits for.

    Inside a job the hosts are a step of it. Elsewhere `salloc` asks for an allocation and runs that step as its
    command: when the hosts have ended, also because the notebook was killed, Slurm takes the allocation back.
    """

    def __init__(self, request: SlurmRequest, note: Callable[[str], None]) -> None:
        self._request = request
        self._note = note
        self._job_id = os.environ.get("SLURM_JOB_ID", "")
        self._is_own = not self._job_id
        self._is_granted = not self._is_own
        self._listener: TlsListener | None = None
        self._starter: StartProcess | None = None
        self._more_starters: list[StartProcess] = []
        self._nodes: list[Node] = []
        self._shown = ""
        self._due_s = 0.0
        self._num_nodes = self._count_nodes()
        name = "salloc" if self._is_own else "srun"
        if shutil.which(name) is None:
            raise LaunchError(
                "starting ranks by Slurm",
                found=f"`{name}` is not installed on this machine",
                fix="Start the notebook on a login node or inside `salloc`, or give `hosts=[...]`",
            )

    def _count_nodes(self) -> int:
        wanted = self._request.num_nodes
        if self._is_own:
            return wanted or 1
        given = int(os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1)
        if wanted is not None and wanted > given:
            raise LaunchError(
                f"starting ranks on {wanted} nodes",
                found=f"this process is in job {self._job_id}, which has {given} node{'s' * (given > 1)}",
                fix=f"Ask for {given}, or `salloc --nodes={wanted}` first",
            )
        return wanted or given

    def open(self, directory: str) -> list[Node]:
        """Start a host on each node, once Slurm has granted the allocation."""
        listener = self._listener = TlsListener(self._num_nodes)
        try:
            line = self._first_line(listener, None, directory)
            starter = self._starter = StartProcess(self._command(), line, keeps_pipes=False)
            self._nodes = [Node(f"{number} of the job", number, starter) for number in range(self._num_nodes)]
            self._await_nodes(listener, starter)
        except BaseException:
            for node in self._nodes:
                node.close(is_killed=True)
            self.close()
            raise
        listener.close()
        return self._nodes

    def _first_line(self, listener: TlsListener, node_rank: int | None, directory: str) -> bytes:
        return first_line(
            node_rank=node_rank,
            num_nodes=self._num_nodes,
            directory=directory,
            port=listener.port,
            certificate=listener.certificate,
            keys=[listener.key(number) for number in range(self._num_nodes)],
        )

    def reopen(self, node: Node, directory: str) -> None:
        """Start the host of a lost node again, by a step of its own."""
        lost = parse_lost_nodes(self._ask("scontrol", "show", "node", "--oneliner", node.name))
        if node.name in lost:
            why = f" ({lost[node.name]})" if lost[node.name] else ""
            raise self._reopen_error(node, f"Slurm reports it as down{why}")
        words = [f"--jobid={self._job_id}", f"--nodelist={node.name}", f"--immediate={_REOPEN_LIMIT_S}"]
        with contextlib.closing(TlsListener(self._num_nodes)) as listener:
            line = self._first_line(listener, node.node_rank, directory)
            node.starter = StartProcess(srun_command(1, words), line, keeps_pipes=False)
            self._more_starters.append(node.starter)
            try:
                self._await_nodes(listener, node.starter)
            except LaunchError as error:
                failed = _LAUNCH_FAILED.search(node.starter.text())
                found = f"Slurm cannot start a step on it ({failed[1]})" if failed is not None else error.found
                raise self._reopen_error(node, found) from None

    def _reopen_error(self, node: Node, found: str) -> LaunchError:
        did = f"starting node {node.name} again"
        return LaunchError(did, found=found, fix=_NODE_DOWN_FIX.format(node=node.name))

    def describe_job_end(self) -> str:
        """Return how the job has ended, such as "job 12 was cancelled"; "" while it is running.

        While it ends, Slurm does not say how; that takes at most 3 s here.
        """
        end_s, state = time.monotonic() + _END_LIMIT_S, "COMPLETING"
        while state == "COMPLETING" and time.monotonic() < end_s:
            shown = self._ask("scontrol", "show", "job", "--oneliner", self._job_id, limit_s=_END_LIMIT_S)
            found = re.search(r"JobState=([A-Z_]+) Reason=(\S+)", shown)
            state = _END_REASONS.get(found[2], found[1]) if found is not None else ""
            time.sleep(_POLL_S if state == "COMPLETING" else 0)
        return f"job {self._job_id} {_ENDS[state]}" if state in _ENDS else ""

    def _command(self) -> list[str]:
        words = self._request.words()
        if not self._is_own:
            gpus = [word for word in words if word.startswith("--gpus-per-node")]
            return srun_command(self._num_nodes, [f"--jobid={self._job_id}", *gpus])
        name = [] if "job-name" in self._request.options else ["--job-name=ddpilot-session"]
        asked = ["salloc", f"--nodes={self._num_nodes}", "--no-kill", *name, *words]
        return [*asked, *srun_command(self._num_nodes, [])]

    def _await_nodes(self, listener: TlsListener, starter: StartProcess) -> None:
        """Wait until all nodes have connected. The timeout starts when the allocation is granted."""
        deadline_s = float("inf")
        while any(node.link is None for node in self._nodes):
            for node in self._nodes:
                if node.link is None and (stream := listener.take(node.node_rank)) is not None:
                    node.use(stream)
            if starter.exitcode is not None:
                raise self._error(f"`{starter.name}` exited with code {starter.exitcode}{starter.last_lines()}")
            text = starter.text()
            if CANNOT_CONNECT in text:
                raise self._error(
                    f"a node of job {self._job_id} cannot connect to this machine{starter.last_lines()}",
                    "Start the notebook on a machine that compute nodes can reach, such as one of them",
                )
            self._look_at_job(text)
            if self._is_granted:
                deadline_s = min(deadline_s, time.monotonic() + START_LIMIT_S)
            if time.monotonic() > deadline_s:
                missing = [str(node.node_rank) for node in self._nodes if node.link is None]
                raise self._error(
                    f"nodes {', '.join(missing)} of job {self._job_id} did not connect to this machine in "
                    f"{START_LIMIT_S:g} s{starter.last_lines()}",
                    "Check that compute nodes can reach this machine, or start the notebook on one of them",
                )
            time.sleep(_POLL_S)

    def _look_at_job(self, text: str) -> None:
        """Note the job's number, and while it is pending why."""
        found = _JOB_ID.search(text)
        if found is None or not self._is_own:
            return
        self._job_id = found[1]
        if _GRANTED.search(text):
            if not self._is_granted and self._shown:
                self._note(f"job {self._job_id} was granted")
            self._is_granted = True
        elif time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _REASON_EVERY_S
            reason, _, start = self._ask("squeue", "--noheader", f"--jobs={self._job_id}", "--format=%r|%S").partition(
                "|"
            )
            when = f"; expected start {start}" if start not in ("", "N/A") else ""
            shown = f"waiting for job {self._job_id}, which is pending: {reason or 'no reason given yet'}{when}"
            if shown != self._shown:
                self._shown = shown
                self._note(shown)

    def _ask(self, *words: str, limit_s: float = _COMMAND_LIMIT_S) -> str:
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip()

    def _error(self, found: str, fix: str = "") -> LaunchError:
        did = f"starting ranks on {self._num_nodes} node{'s' * (self._num_nodes > 1)} by Slurm"
        return LaunchError(did, found=found, fix=fix or "Check the options with `salloc` in a terminal")

    def close(self) -> None:
        """End the step, and the allocation if it was asked for by this session."""
        if self._listener is not None:
            self._listener.close()
        starter, self._starter = self._starter, None
        if starter is None:
            return
        self._look_at_job(starter.text())
        lost = bool(self._more_starters) or any(node.link is None or node.was_lost for node in self._nodes)
        is_pending = self._is_own and not self._is_granted
        if is_pending or (lost and self._is_own):
            self._cancel(self._job_id)
        elif lost:
            starter.terminate()
        for each in (*self._more_starters, starter):
            each.close(_END_LIMIT_S)
        if self._is_own:
            self._cancel(self._job_id)
        elif lost:
            for step in {node.step for node in self._nodes}:
                self._cancel(step)

    def _cancel(self, job_or_step: str) -> None:
        if job_or_step:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(["scancel", "--quiet", job_or_step], timeout=_COMMAND_LIMIT_S, check=False)


def make_cluster(options: SessionOptions, note: Callable[[str], None]) -> Cluster | None:
    """Return what starts the hosts of a session; None if its ranks run on this machine."""
    if options.hosts:
        return SshCluster(options.hosts)
    if options.slurm:
        request = SlurmRequest(
            num_nodes=options.nodes, gpus_per_node=options.gpus_per_node, options=options.slurm_options
        )
        return SlurmCluster(request, note)
    return None
