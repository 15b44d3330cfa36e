# SPDX-License-Identifier: Apache-2.0
"""Signals to `ddpilot run`, and its own end."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.dist.launching.scripts import finish
from tests.dist.run.commands import RUN, started, wait_for_line, write
from tests.ports import kept_port

SAVES = """
import os, signal, sys, time
def save(number, frame):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", os.getpid(), flush=True)
time.sleep(60)
"""
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", os.getpid(), flush=True)
time.sleep(60)
"""


def ready(process: subprocess.Popen[str], num_ranks: int) -> list[int]:
    """The pids of the ranks, once all are there."""
    return [int(wait_for_line(process, "ready").split()[-1]) for _ in range(num_ranks)]


@pytest.mark.timeout(120)
def test_run_passes_a_signal_on_and_gives_ranks_time_to_save(tmp_path: Path) -> None:
    """SIGTERM from a scheduler reaches the script's own handler; the status is torchrun's; a notice has the ends."""
    write(tmp_path, "train.py", SAVES)
    with started([*RUN, "-n", 2, "train.py"], tmp_path) as process:
        ready(process, 2)
        process.send_signal(signal.SIGTERM)
        done = finish(process, 30)
    assert done.code == 1
    assert "saved" in done.out
    assert done.notes() == [
        "ddpilot: sending SIGTERM to ranks 0,1; they have 30 s (send it again to kill them now)",
        "ddpilot: `train.py` was stopped by SIGTERM: rank 0 exited with code 0; rank 1 exited with code 0",
    ]


@pytest.mark.timeout(120)
def test_run_kills_the_ranks_when_it_is_interrupted_twice(tmp_path: Path) -> None:
    """Ranks that ignore Ctrl-C are gone at the second one."""
    write(tmp_path, "train.py", STUBBORN)
    with started([*RUN, "-n", 2, "train.py"], tmp_path) as process:
        pids = ready(process, 2)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "SIGINT to ranks 0,1" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        done = finish(process, 30)
    assert done.code == 1
    assert not any(map(psutil.pid_exists, pids))
    assert done.notes()[-1].endswith("rank 0 was killed by SIGKILL; rank 1 was killed by SIGKILL")


@pytest.mark.timeout(120)
def test_run_takes_its_ranks_along_when_it_is_killed(tmp_path: Path) -> None:
    """`kill -9` of torchrun leaves its ranks, with port and GPU; these go within two seconds."""
    write(tmp_path, "train.py", STUBBORN)
    # Nobody is left to remove its folder for the ranks' reports.
    with started([*RUN, "-n", 2, "train.py"], tmp_path, TMPDIR=str(tmp_path)) as process:
        pids = ready(process, 2)
        process.kill()
        process.wait(10)
        deadline_s = time.monotonic() + 10
        while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not any(map(psutil.pid_exists, pids))


@pytest.mark.timeout(120)
def test_run_ends_when_nobody_reads_its_output(tmp_path: Path) -> None:
    """As in `ddpilot run ... | head`: the ranks end without a message, as any program does there."""
    write(tmp_path, "train.py", "import time\nfor i in range(600):\n    print(i, flush=True)\n    time.sleep(0.1)\n")
    with started([*RUN, "-n", 2, "train.py"], tmp_path) as process:
        wait_for_line(process, "3")
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(30) == 128 + signal.SIGPIPE
    assert said == ""


@pytest.mark.timeout(120)
def test_run_can_be_interrupted_while_it_waits_for_a_node(tmp_path: Path) -> None:
    """torchrun's wait is one C++ call; this one names the missing nodes, and ends at once with a shell's status."""
    write(tmp_path, "train.py", "")
    with kept_port() as port:
        words = ["--nnodes", 2, "-n", 1, "--master-addr", "127.0.0.1", "--master-port", port, "train.py"]
        with started([*RUN, *words], tmp_path) as process:
            assert process.stderr is not None
            assert f"waiting for node 1 of 2 nodes at 127.0.0.1:{port}" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            done = finish(process, 30)
    assert done.code == 128 + signal.SIGINT
    assert re.fullmatch(r"ddpilot: node 0 \(.+\) was stopped by SIGINT before ranks were started\n", done.err)


@pytest.mark.timeout(120)
def test_run_can_be_stopped_while_torch_connects(tmp_path: Path) -> None:
    """torch's c10d rendezvous connects in C++, which blocks signals; a notice describes the wait."""
    write(tmp_path, "train.py", "")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-conf", "is_host=0", "-n", 1, "train.py"]
        with started([*RUN, *words], tmp_path) as process:
            assert process.stderr is not None
            said = process.stderr.readline()
            assert said.startswith(f"ddpilot: waiting for the c10d rendezvous of 1 node at {endpoint}, for 5 s")
            process.send_signal(signal.SIGTERM)
            done = finish(process, 30)
    assert done.code == 128 + signal.SIGTERM
    assert done.notes() == ["ddpilot: `train.py` was stopped by SIGTERM before ranks were started"]
