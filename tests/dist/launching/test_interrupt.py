# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C: SIGINT, then freeing the group, then SIGKILL, each after its grace; the parent is usable after it."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from ddpilot.errors import LaunchInterrupted
from ddpilot.launching.launch import run_local
from ddpilot.launching.observer import LaunchObserver
from ddpilot.launching.options import LaunchOptions
from tests.dist.launching.scripts import finish, is_alive, running, wait_until

pytestmark = pytest.mark.timeout(240)  # the first test waits for all of the ways

# What ranks do when they are interrupted.
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
    "interrupted_twice": "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)",
}
GRACE_S = {"in_python": 20, "in_a_collective": 20, "catching": 20, "interrupted_twice": 50}
"""Of the other ways: 0.5."""

PARENT = """
import ctypes, os, signal, sys, time
from ddpilot import Launcher

def run(name, grace_s):
    os.mkdir(name)
    # What is stuck here waits for Ctrl-C, not for the watch.
    launcher = Launcher(nproc_per_node=2, watch=False, stop_grace_s=grace_s)
    try:
        print(list(launcher.run(train, os.path.abspath(name))))
    except KeyboardInterrupt as error:
        print(type(error).__name__, error)
    print("usable:", list(launcher.run(os.getcwd)) == [os.getcwd()] * 2)
    for stream in (sys.stdout, sys.stderr):
        print("end of way", file=stream, flush=True)
    open(f"{name}/ended", "w").close()
"""
WAY = """
def train(folder):
    import torch, torch.distributed as dist
    from ddpilot.training.coordination.stop import StopSignals
    dist.init_process_group("gloo")
    dist.barrier()
    said = []
    rank = dist.get_rank()
    with open(f"{folder}/{rank}.writing", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/{rank}.writing", f"{folder}/{rank}")
    WAY

run("NAME", GRACE)
"""


class End(NamedTuple):
    """What the parent wrote in one way, and how long it took from the first interrupt."""

    out: str
    err: str
    took_s: float


def interrupt(parent: subprocess.Popen[str], folder: Path, *, times: int) -> float:
    """Send SIGINT `times` times once the ranks are in the way of `folder`; the seconds until it has ended."""
    wait_until(lambda: all((folder / str(rank)).exists() for rank in range(2)))
    time.sleep(0.2)  # into the wait itself
    start = time.monotonic()
    for _ in range(times):
        parent.send_signal(signal.SIGINT)
        time.sleep(0.2)  # two at once are one
    wait_until((folder / "ended").exists, limit_s=60)
    took_s = time.monotonic() - start
    assert not any(is_alive(int((folder / str(rank)).read_text())) for rank in range(2))
    return took_s


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, End]:
    """One parent that launches in all ways in turn, and is usable after each."""
    folder = tmp_path_factory.mktemp("ways")
    source = PARENT
    for name, way in WAYS.items():
        source += WAY.replace("WAY", way).replace("NAME", name).replace("GRACE", str(GRACE_S.get(name, 0.5)))
    with running(source, folder) as parent:
        took_s = [interrupt(parent, folder / name, times=2 if name == "interrupted_twice" else 1) for name in WAYS]
        outcome = finish(parent)
    assert outcome.code == 0, outcome.err
    outs, errs = (text.split("end of way\n")[:-1] for text in (outcome.out, outcome.err))
    assert all(out.endswith("usable: True\n") for out in outs), outcome
    return dict(zip(WAYS, map(End, outs, errs, took_s), strict=True))


def test_ctrl_c_ends_ranks_in_python_with_their_own_keyboard_interrupt(ends: dict[str, End]) -> None:
    """The first step: SIGINT in every rank; LaunchInterrupted is a KeyboardInterrupt and has each rank's end."""
    out, err, _ = ends["in_python"]
    each = "rank 0 ended at KeyboardInterrupt; rank 1 ended at KeyboardInterrupt"
    assert out.startswith(f"LaunchInterrupted the launch of `train` was stopped: {each}\n")
    limits = "20 s, or 60 s where they train to the end of an update"
    assert f"ddpilot: interrupting ranks 0,1; they have {limits} (interrupt again to kill them now)" in err


def test_ctrl_c_ends_a_rank_in_a_collective_with_the_peer_it_waits_for(ends: dict[str, End]) -> None:
    """One rank ends at its KeyboardInterrupt, and the other one's all_reduce with it."""
    out, err, _ = ends["in_a_collective"]
    assert "was stopped: rank 0 ended at KeyboardInterrupt; rank 1 " in out
    assert "killing" not in err


def test_ctrl_c_frees_the_group_when_all_ranks_are_stuck_in_a_collective(ends: dict[str, End]) -> None:
    """The second step: what SIGINT does not reach inside C++ ends when the group is freed, without a kill."""
    out, err, _ = ends["in_a_collective_all"]
    assert "SIGKILL" not in out
    assert "did not exit; aborting the process group" in err
    assert "killing" not in err
    assert "still finishing the update" not in err


@pytest.mark.parametrize("way", ["ignoring", "in_c"])
def test_ctrl_c_kills_ranks_that_ignore_everything_else(way: str, ends: dict[str, End]) -> None:
    """The third step: SIGKILL, also while C code holds the interpreter; after grace and one second, no later."""
    out, err, took_s = ends[way]
    assert "rank 0 was killed by SIGKILL; rank 1 was killed by SIGKILL" in out
    steps = ["interrupting ranks 0,1", "aborting the process group", "killing ranks 0,1"]
    places = [err.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)
    assert took_s < 10


def test_ctrl_c_twice_kills_at_once(ends: dict[str, End]) -> None:
    """Who presses again does not want to wait for the grace."""
    out, _, took_s = ends["interrupted_twice"]
    assert "rank 0 was killed by SIGKILL; rank 1 was killed by SIGKILL" in out
    assert took_s < 20


def test_ctrl_c_gives_the_values_of_ranks_that_take_it_as_their_cue(ends: dict[str, End]) -> None:
    """A function that catches KeyboardInterrupt and returns has its values come back."""
    assert ends["catching"].out.startswith("['saved', 'saved']\n")


def test_ctrl_c_leaves_ranks_that_take_it_the_time_for_an_update(ends: dict[str, End]) -> None:
    """What `Loop` does: an update that is longer than the grace comes to its end, and the values come back."""
    out, err, _ = ends["taking"]
    assert out.startswith("[['SIGINT'], ['SIGINT']]\n")
    assert "ranks 0,1: still finishing the update (interrupt again to kill them now)" in err


def test_ctrl_c_leaves_no_such_time_to_a_rank_whose_peer_has_ended(ends: dict[str, End]) -> None:
    """One was interrupted before its loop, so the other one waits for it in vain."""
    out, _, took_s = ends["taking_alone"]
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
launcher = ddpilot.Launcher(nproc_per_node=1, output="silent")
for number in range(5):
    try:
        while True:
            launcher.run(os.getpid)
            open(f"going{number}", "w").close()
    except KeyboardInterrupt:
        print("stopped", len(launcher.run(os.getpid)))
"""


def test_ctrl_c_stops_a_loop_of_launches_wherever_it_comes(tmp_path: Path) -> None:
    """An interrupt between or at the very end of launches is not lost; five moments of a loop."""
    with running(LOOP, tmp_path) as parent:
        for number in range(5):
            wait_until((tmp_path / f"going{number}").exists)
            time.sleep(0.013 * number)
            parent.send_signal(signal.SIGINT)
        outcome = finish(parent, limit_s=20)
    assert outcome.out == "stopped 1\n" * 5, outcome


def test_ctrl_c_before_any_rank_runs_is_one_line() -> None:
    """While ranks are started, a KeyboardInterrupt that has no frames of the launcher to show in a notebook."""

    def press(_name: str, _count: int) -> LaunchObserver:
        signal.raise_signal(signal.SIGINT)
        return LaunchObserver()

    with pytest.raises(LaunchInterrupted, match=r"starting 2 ranks of .*press` was interrupted before any") as caught:
        run_local(LaunchOptions(nproc_per_node=2), press, ("", 0), {}, press)
    assert caught.value._render_traceback_() == [f"KeyboardInterrupt: {caught.value}"]
