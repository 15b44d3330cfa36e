# SPDX-License-Identifier: Apache-2.0
"""The rank server: proven clean, or not used; nothing of it reaches a rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ddpilot import Launcher, LaunchError, RankError
from ddpilot.launching.rank_server.client import RankServer, _servers, ensure_server, server_pids
from tests.dist.launching.scripts import is_alive, run_script, wait_until

MODULES = {
    "starts_thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
    "fails_to_import": "raise RuntimeError('no licence')\n",
    "exits_on_import": "import os\nos._exit(5)\n",
    "slow_to_import": (
        "import os, pathlib, sys, time\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'torch._dynamo':\n"
        "            pathlib.Path(__file__).with_name('server_pid').write_text(str(os.getpid()))\n"
        "            time.sleep(60)\n"
        "sys.meta_path.insert(0, Finder)\n"
    ),
    "no_more_processes": (
        "import os\nfork, made = os.fork, []\n"
        "def limited():\n    made.append(1)\n    if len(made) > 2: raise BlockingIOError(11, 'no process left')\n"
        "    return fork()\nos.fork = limited\n"
    ),
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on `sys.path` with modules to preload; servers that know it are stopped afterwards."""
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for server in [server for server in _servers.warm if server.key.preload]:
        server.stop()
        _servers.warm.remove(server)


def facts() -> dict[str, Any]:
    """What a rank sees of the process it came from."""
    import multiprocessing

    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
    targets = list(_open_files())
    return {
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "default": multiprocessing.get_context().get_start_method(),
        "sockets": sum(target.startswith("socket:") for target in targets),
        "pipes": sum(target.startswith("pipe:") for target in targets),
        "pidfds": sum("pidfd" in target for target in targets),
        "ppid": os.getppid(),
        "main": sorted(name for name in vars(sys.modules["__main__"]) if not name.startswith("__")),
        "nvml": (os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"), _first_environ(os.getppid())),
        "stack": sys._getframe(1).f_code.co_filename.endswith("rank.py"),
    }


def _first_environ(pid: int) -> bool:
    return b"PYTORCH_NVML_BASED_CUDA_CHECK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def _open_files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of this listing, and what another thread has just closed
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def fail() -> None:
    """A failing function."""
    raise ValueError("bad sample")


def test_ranks_hold_no_end_of_the_server_s_pipes_and_keep_the_default_start_method() -> None:
    """ "Ours never imports `__main__`, its ranks hold no end of its pipes, and the default start method stays."

    A rank has one socket, its own to the parent, and two pipes, its stdout and stderr.
    """
    import multiprocessing

    (server_pid,) = {one["ppid"] for one in Launcher(nproc_per_node=2).run(facts)}
    assert server_pid in server_pids()
    for seen in Launcher(nproc_per_node=2, watch=False).run(facts):  # a recording lets go of a group 50 ms later
        assert (seen["sockets"], seen["pipes"], seen["pidfds"]) == (1, 2, 0)
        assert (seen["start_method"], seen["default"]) == (None, multiprocessing.get_context().get_start_method())
        assert seen["main"] == []
        assert seen["nvml"] == (
            None,
            True,
        )  # in the server, modules ask for GPUs without `cuInit`
        assert seen["stack"]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of a script without a main guard that launches as its first act, on one core."""
    source = (
        "print('top level')\nimport os, sys, ddpilot\nseen = 'of the parent'\n"
        "os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])\n"
        "def train(x):\n    return x + 1, {'torch._dynamo', 'ddpilot.launcher'} <= set(sys.modules)\n"
        "for result in ddpilot.launch(train, 1, nproc_per_node=2):\n    print(*result)\n"
    )
    return run_script(source, tmp_path_factory.mktemp("script")).out


def test_server_never_imports_main(printed: str) -> None:
    """A script without a main guard launches, and its top level runs once, in the parent alone."""
    assert [line.split()[0] for line in printed.splitlines()] == ["top", "2", "2"]


def test_ranks_that_are_more_than_the_cores_find_imported_what_many_of_them_need(printed: str) -> None:
    """Also in the first launch of a process: once before the fork, not once in each of them."""
    assert [line.split()[1] for line in printed.splitlines()[1:]] == ["True", "True"]


@pytest.mark.usefixtures("modules")
def test_launch_falls_back_to_fresh_interpreters_when_a_preloaded_module_starts_a_thread(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """ "User `preload=` modules can break that: then say which did and fall back to spawn"; the ranks work the same."""
    launcher = Launcher(nproc_per_node=1, preload=("json", "starts_thread"), watch=False)
    assert [one["sockets"] for one in launcher.run(facts)] == [1]
    said = capfd.readouterr().err
    assert "ddpilot: importing `starts_thread` started 1 thread (" in said
    assert "so ranks start as fresh interpreters" in said
    with pytest.raises(LaunchError, match="cannot be forked safely: importing `starts_thread` started 1 thread"):
        replace(launcher, nproc_per_node=2, start_method="fork").run(facts)


@pytest.mark.usefixtures("modules")
def test_launch_says_which_preloaded_module_cannot_be_imported() -> None:
    """The module and its own traceback; and what is known when it ends the whole process; no process is left."""
    with pytest.raises(LaunchError, match="(?s)`fails_to_import` cannot be imported.*RuntimeError: no licence"):
        Launcher(nproc_per_node=1, preload=("fails_to_import",)).run(facts)
    with pytest.raises(LaunchError, match="starting the rank server: it exited with code 5 before it was ready"):
        Launcher(nproc_per_node=1, preload=("exits_on_import",)).run(facts)


@pytest.mark.usefixtures("modules")
def test_launch_names_the_rank_for_which_the_system_has_no_process() -> None:
    """The store and rank 0 started, rank 1 did not: the error names rank 1, and rank 0 is killed."""
    with pytest.raises(LaunchError, match=r"starting rank 1 of `facts`: .*no process left. Ask for fewer ranks"):
        Launcher(nproc_per_node=3, preload=("no_more_processes",)).run(facts)


def test_launch_gives_the_same_results_and_failures_when_ranks_are_spawned() -> None:
    """`start_method="spawn"` is slower and otherwise the same: values, exception, text."""
    texts = []
    for method in ("fork", "spawn"):
        launcher = Launcher(nproc_per_node=1, start_method=method, output="silent", watch=False)
        assert [one["pipes"] for one in launcher.run(facts)] == [2]
        with pytest.raises(RankError) as caught:
            launcher.run(fail)
        assert isinstance(caught.value.__cause__, ValueError)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_launch_says_that_the_server_was_killed_and_the_next_one_works() -> None:
    """kill -9 of the server kills the ranks at once, and raises a LaunchError."""

    def kill_server() -> None:
        import time

        if os.environ["RANK"] == "0":
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    def pid() -> int:
        return os.getpid()

    launcher = Launcher(nproc_per_node=2)
    launcher.run(pid)
    server = server_pids()[-1]
    with pytest.raises(LaunchError, match="running `.*kill_server`: the rank server ended, and the ranks with it"):
        launcher.run(kill_server)
    wait_until(lambda: not is_alive(server))
    assert len(set(launcher.run(pid))) == 2
    server = server_pids()[-1]
    os.kill(server, signal.SIGKILL)  # while nothing runs: it is not noticed at all
    wait_until(lambda: not is_alive(server))
    assert len(set(launcher.run(pid))) == 2


def test_ensure_server_keeps_one_server_per_environment() -> None:
    """ "A changed import-time variable (`TORCH_*`, `OMP_*`, ...) starts a new server"; another variable does not."""
    environ = dict(os.environ)
    server = ensure_server(environ, (), True)
    assert ensure_server({**environ, "SOME_PATH": "x"}, (), True) is server
    assert ensure_server({**environ, "OMP_NUM_THREADS": "3"}, (), True) is not server
    assert ensure_server(environ, (), True) is server


def test_an_interrupt_while_a_server_is_looked_for_costs_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where its files are looked at, nor where another one is stopped: it is stopped with the next look."""
    environ = dict(os.environ)
    server = ensure_server(environ, (), True)

    def interrupted(_: RankServer) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RankServer, "is_fresh", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ensure_server(environ, (), True)
    assert ensure_server(environ, (), True) is server
    with monkeypatch.context() as patch:
        patch.setattr(RankServer, "is_fresh", lambda _: False)
        patch.setattr(RankServer, "stop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ensure_server(environ, (), True)
    assert is_alive(server.pid)
    assert ensure_server(environ, (), True) is not server
    assert not is_alive(server.pid)


def test_launch_starts_a_new_server_when_a_preloaded_module_changed(modules: Path) -> None:
    """ "A changed file of a preloaded module starts a new server", and the ranks see the new text."""

    def version() -> int:
        import importlib

        return int(importlib.import_module("versioned").VERSION)

    launcher = Launcher(nproc_per_node=1, preload=("versioned",))
    (modules / "versioned.py").write_text("VERSION = 1\n")
    assert list(launcher.run(version)) == [1]
    first = server_pids()[-1]
    (modules / "versioned.py").write_text("VERSION = 22\n")
    assert list(launcher.run(version)) == [22]
    assert server_pids()[-1] != first
    wait_until(lambda: not is_alive(first))


def test_server_exits_with_its_parent_while_it_imports(modules: Path) -> None:
    """An import of the idle server may take seconds on a busy machine."""
    pid_file = modules / "server_pid"
    program = (
        "import sys, time, ddpilot; sys.path.insert(0, sys.argv[1]); "
        "ddpilot.Launcher(nproc_per_node=1, preload=('slow_to_import',)).run(int); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(modules)])
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text() != "", limit_s=60)
    finally:
        parent.kill()
        parent.wait()
    server = int(pid_file.read_text())
    try:
        wait_until(lambda: not is_alive(server), limit_s=2)
    finally:
        if is_alive(server):
            os.kill(server, signal.SIGKILL)
