# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C: SIGINT, then freeing the group, then SIGKILL, each after its grace; the parent is usable after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpilot.errors import LaunchInterrupted
from ddpilot.launching.function_launch.launch import run_local
from ddpilot.launching.observer import LaunchObserver
from ddpilot.launching.options import LaunchOptions
from tests.dist.launching.scripts import LIMIT_S, finish, is_alive, running, started, wait_until

Parent = subprocess.Popen[str]

# How ranks wait, before and after they say that they are ready.
WAYS = {
    "in_python": "while True: time.sleep(0.01)",
    "in_a_collective": "time.sleep(600) if rank == 0 else dist.all_reduce(torch.ones(1))",
    "in_a_collective_all": "if rank: StopSignals(said.append).__enter__()\n    dist.recv(torch.ones(1), src=1 - rank)",
    "catching": "try: time.sleep(600)\n    except KeyboardInterrupt: return 'saved'",
    "taking": "StopSignals(said.append).__enter__()\n    while not said: time.sleep(0.01)\n"
    "    time.sleep(2)\n    return said",
    "taking_alone": "if rank: StopSignals(said.append).__enter__()\n    while True: time.sleep(0.01)",
    "ignoring": "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)",
    "in_c": "signal.signal(signal.SIGINT, signal.SIG_IGN); ctypes.PyDLL(None).sleep(600)",
}

PARENT = """
import ctypes, json, os, signal, sys, time
from ddpilot import Launcher

WAITS

def train(folder, way):
    import torch.distributed as dist
    from ddpilot.training.coordination.stop import StopSignals
    dist.init_process_group("gloo")
    dist.barrier()
    rank = dist.get_rank()
    with open(f"{folder}/{rank}.writing", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/{rank}.writing", f"{folder}/{rank}")
    return WAYS[way](rank, dist, [], StopSignals)

Launcher(nproc_per_node=2, watch=False).run(os.getcwd)
print("ready", flush=True)
for line in sys.stdin:
    folder, way, grace_s = json.loads(line)
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), fd)
    # What is stuck here waits for Ctrl-C, not for the watch.
    launcher = Launcher(nproc_per_node=2, watch=False, stop_grace_s=grace_s)
    try:
        print(list(launcher.run(train, folder, way)))
    except KeyboardInterrupt as error:
        print(type(error).__name__, error)
    print("usable:", list(launcher.run(os.getcwd)) == [os.getcwd()] * 2, flush=True)
    open(f"{folder}/done", "w").close()
"""


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parent]:
    """One process that launches for all tests here that interrupt it: it stays usable."""
    waits = "\n".join(
        f"def {way}(rank, dist, said, StopSignals):\n    import torch\n    {code}" for way, code in WAYS.items()
    )
    source = PARENT.replace("WAITS", waits + f"\nWAYS = dict({', '.join(f'{way}={way}' for way in WAYS)})")
    folder = tmp_path_factory.mktemp("parent")
    (folder / "script.py").write_text(source)
    with started([sys.executable, "script.py"], folder, dict(os.environ), subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"  # its rank server is there before the first test
        yield process


def interrupt(
    parent: Parent, way: str, folder: Path, *, grace_s: float = 0.5, times: int = 1
) -> tuple[str, str, float]:
    """(stdout, stderr, seconds) of a launch of `parent`, which gets SIGINT `times` times while ranks wait in `way`."""
    assert parent.stdin is not None
    parent.stdin.write(json.dumps([str(folder), way, grace_s]) + "\n")
    parent.stdin.flush()
    wait_until(lambda: all((folder / str(rank)).exists() for rank in range(2)))
    time.sleep(0.2)  # into the wait itself
    start = time.monotonic()
    for _ in range(times):
        parent.send_signal(signal.SIGINT)
        time.sleep(0.2)  # two at once are one
    wait_until(lambda: (folder / "done").exists() or parent.poll() is not None, limit_s=LIMIT_S)
    took_s = time.monotonic() - start
    out, err = ((folder / name).read_text() for name in ("out", "err"))
    assert out.endswith("usable: True\n"), (out, err)
    pids = [int((folder / str(rank)).read_text()) for rank in range(2)]
    assert not any(map(is_alive, pids))
    return out, err, took_s


def test_ctrl_c_ends_ranks_in_python_with_their_own_keyboard_interrupt(parent: Parent, tmp_path: Path) -> None:
    """The first step: SIGINT in every rank; LaunchInterrupted is a KeyboardInterrupt and has each rank's end."""
    out, err, _ = interrupt(parent, "in_python", tmp_path, grace_s=20)
    ends = "rank 0 ended at KeyboardInterrupt; rank 1 ended at KeyboardInterrupt"
    assert out.startswith(f"LaunchInterrupted the launch of `train` was stopped: {ends}\n")
    limits = "20 s, or 60 s where they train to the end of an update"
    assert f"ddpilot: interrupting ranks 0,1; they have {limits} (interrupt again to kill them now)" in err


def test_ctrl_c_ends_a_rank_in_a_collective_with_the_peer_it_waits_for(parent: Parent, tmp_path: Path) -> None:
    """One rank ends at its KeyboardInterrupt, and the other one's all_reduce with it."""
    out, err, _ = interrupt(parent, "in_a_collective", tmp_path, grace_s=20)
    assert "was stopped: rank 0 ended at KeyboardInterrupt; rank 1 " in out
    assert "killing" not in err


def test_ctrl_c_frees_the_group_when_all_ranks_are_stuck_in_a_collective(parent: Parent, tmp_path: Path) -> None:
    """The second step: what SIGINT does not reach inside C++ ends when the group is freed, without a kill."""
    out, err, _ = interrupt(parent, "in_a_collective_all", tmp_path)
    assert "SIGKILL" not in out
    assert "did not exit; aborting the process group" in err
    assert "killing" not in err
    assert "still finishing the update" not in err


@pytest.mark.parametrize("way", ["ignoring", "in_c"])
def test_ctrl_c_kills_ranks_that_ignore_everything_else(parent: Parent, way: str, tmp_path: Path) -> None:
    """The third step: SIGKILL, also while C code holds the interpreter; after grace and one second, no later."""
    out, err, took_s = interrupt(parent, way, tmp_path)
    assert "rank 0 was killed by SIGKILL; rank 1 was killed by SIGKILL" in out
    steps = ["interrupting ranks 0,1", "aborting the process group", "killing ranks 0,1"]
    places = [err.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)
    assert took_s < 10


def test_ctrl_c_twice_kills_at_once(parent: Parent, tmp_path: Path) -> None:
    """Who presses again does not want to wait for the grace."""
    out, _, took_s = interrupt(parent, "ignoring", tmp_path, grace_s=50, times=2)
    assert "rank 0 was killed by SIGKILL; rank 1 was killed by SIGKILL" in out
    assert took_s < 20


def test_ctrl_c_gives_the_values_of_ranks_that_take_it_as_their_cue(parent: Parent, tmp_path: Path) -> None:
    """A function that catches KeyboardInterrupt and returns has its values come back."""
    out, _, _ = interrupt(parent, "catching", tmp_path, grace_s=20)
    assert out.startswith("['saved', 'saved']\n")


def test_ctrl_c_leaves_ranks_that_take_it_the_time_for_an_update(parent: Parent, tmp_path: Path) -> None:
    """What `Loop` does: an update that is longer than the grace comes to its end, and the values come back."""
    out, err, _ = interrupt(parent, "taking", tmp_path)
    assert out.startswith("[['SIGINT'], ['SIGINT']]\n")
    assert "ranks 0,1: still finishing the update (interrupt again to kill them now)" in err


def test_ctrl_c_leaves_no_such_time_to_a_rank_whose_peer_has_ended(parent: Parent, tmp_path: Path) -> None:
    """One was interrupted before its loop, so the other one waits for it in vain."""
    out, _, took_s = interrupt(parent, "taking_alone", tmp_path)
    assert "rank 0 ended at KeyboardInterrupt; rank 1 was killed by SIGKILL" in out
    assert took_s < 20


STARTING = """
import os, sys, ddpilot
from ddpilot.launching.rank_server.client import server_pids
open("starting", "w").close()
try:
    ddpilot.Launcher(nproc_per_node=2, preload=("slow",)).run(os.getpid)
except KeyboardInterrupt:
    print("interrupted", server_pids())
print(len(ddpilot.launch(os.getpid, nproc_per_node=2)))
"""


def test_ctrl_c_while_the_server_starts_leaves_no_server(tmp_path: Path) -> None:
    """The half-started server is terminated, and the next launch starts a new one."""
    (tmp_path / "slow.py").write_text(
        "import os, time\nopen('pid.writing', 'w').write(str(os.getpid()))\n"
        "os.rename('pid.writing', 'pid')\ntime.sleep(600)\n"
    )
    with running(STARTING, tmp_path, env={"PYTHONPATH": str(tmp_path)}) as parent:
        wait_until((tmp_path / "pid").exists)
        parent.send_signal(signal.SIGINT)
        outcome = finish(parent)
    assert outcome.out == "interrupted ()\n2\n", outcome
    assert not is_alive(int((tmp_path / "pid").read_text()))


LOOP = """
import os, ddpilot
count = 0
launcher = ddpilot.Launcher(nproc_per_node=1, output="silent")
try:
    while True:
        launcher.run(os.getpid)
        count += 1
        open("going", "w").close()
except KeyboardInterrupt:
    print("stopped")
print(len(launcher.run(os.getpid)))
"""


def test_ctrl_c_stops_a_loop_of_launches_wherever_it_comes(tmp_path: Path) -> None:
    """An interrupt between or at the very end of launches is not lost; five moments of a loop."""
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        with running(LOOP, folder) as parent:
            wait_until((folder / "going").exists)
            time.sleep(0.013 * number)
            parent.send_signal(signal.SIGINT)
            outcome = finish(parent, limit_s=20)
        assert outcome.out == "stopped\n1\n", outcome


def test_ctrl_c_before_any_rank_runs_is_one_line() -> None:
    """While ranks are started, a KeyboardInterrupt that has no frames of the launcher to show in a notebook."""

    def press(_name: str, _count: int) -> LaunchObserver:
        signal.raise_signal(signal.SIGINT)
        return LaunchObserver()

    with pytest.raises(LaunchInterrupted, match=r"starting 2 ranks of .*press` was interrupted before any") as caught:
        run_local(LaunchOptions(nproc_per_node=2), press, ("", 0), {}, press)
    assert caught.value._render_traceback_() == [f"KeyboardInterrupt: {caught.value}"]
