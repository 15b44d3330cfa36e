# SPDX-License-Identifier: Apache-2.0
"""Checks of a machine on real faults: a tiny tmpfs, low limits, busy ports, ranks that have lost their launcher."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddpilot.diagnose.checks import network
from tests.ports import kept_port
from tests.unit.diagnose.checking import check_in_child, make_facts, statuses, text_of


def mounted(size: str, then: str = "true") -> tuple[str, ...]:
    """A command that mounts a tmpfs of `size` on its argument, in a mount namespace of its own."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0:
        pytest.skip("this user may not make mount namespaces")
    script = f'folder=$1; shift; mount -t tmpfs -o size={size} tmpfs "$folder" && {then} && exec "$@"'
    return ("unshare", "-m", "sh", "-c", script, "sh")


def test_shared_memory_is_too_small_in_a_mount_namespace_with_a_tiny_tmpfs() -> None:
    """A /dev/shm of 1 MB, as a container may have, is an error with its size."""
    (found,) = check_in_child("shared_memory", around=(*mounted("1m"), "/dev/shm"))
    assert found[:2] == ["error", "DDP601"]
    assert found[2].startswith("/dev/shm has 1.0 MB free of 1.0 MB")
    assert "--shm-size" in found[3]


@pytest.mark.parametrize(("soft", "status"), [(4096, "ok"), (512, "warning"), (40, "error")])
def test_open_files_says_what_a_low_limit_breaks(soft: int, status: str) -> None:
    """`ulimit -n` in a child: enough, few, and fewer than two ranks open."""
    set_limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, 4096))"
    (found,) = check_in_child("open_files", prepare=set_limit)
    assert found[0] == status
    if status != "ok":
        assert found[1] == "DDP801"
        assert "RLIMIT_NOFILE" in found[2]
        assert "ulimit -n " in found[3]


def test_locked_memory_matters_with_infiniband_only(tmp_path: Path) -> None:
    """A low limit is an error if there is a card, and unlimited is ok."""
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    low = "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))"
    (found,) = check_in_child("locked_memory", root=tmp_path, prepare=low)
    assert found[:2] == ["error", "DDP801"]
    assert "65.5 kB" in found[2]
    assert "mlx5_0" in found[2]
    (found,) = check_in_child("locked_memory", prepare=low)
    assert found[0] == "ok"


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    """A tmpfs of 1 MB, filled: no space, and the write of 8 MB fails."""
    fill = 'head -c 1048576 /dev/zero > "$folder/data"'
    around = (*mounted("1m", fill), str(tmp_path))
    (space,) = check_in_child("checkpoint_space", around=around, folder=tmp_path)
    (write,) = check_in_child("checkpoint_write", around=around, folder=tmp_path)
    assert [space[:2], write[:2]] == [["error", "DDP806"], ["error", "DDP806"]]
    assert f"{tmp_path} (tmpfs) has 0 B free of 1.0 MB" in space[2]
    assert "No space left on device" in write[2]


def test_little_space_is_a_warning(tmp_path: Path) -> None:
    """100 MB free."""
    (found,) = check_in_child("checkpoint_space", around=(*mounted("100m"), str(tmp_path)), folder=tmp_path)
    assert found[:2] == ["warning", "DDP806"]


def test_host_name_that_no_resolver_knows_is_a_warning_on_one_node() -> None:
    """In a namespace with a host name of its own."""
    around = ("unshare", "-u", "sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh")
    if subprocess.run([*around, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not make namespaces of host names")
    (found,) = check_in_child("host_name", around=around)
    assert found[:2] == ["warning", "DDP106"]
    assert "no-such-host.invalid, does not resolve" in found[2]


def test_master_port_names_the_process_that_listens_there() -> None:
    """A free port is ok; a port on which a child listens is an error with its pid and command."""
    with kept_port() as port:
        facts = make_facts(environ={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        assert statuses(network.master_port, facts) == ["ok"]
        code = (
            "import socket, sys; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
            f"s.bind(('127.0.0.1', {port})); s.listen(); print('up', flush=True); sys.stdin.read()"
        )
        words = [sys.executable, "-c", code]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"
            assert statuses(network.master_port, facts) == ["error DDP103"]
            said = text_of(network.master_port, facts)
            assert f"the port is taken by pid {child.pid}: {sys.executable} -c import socket" in said
            assert child.poll() is None
            child.communicate("")


ORPHAN = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    os.environ.update(RANK="3", WORLD_SIZE="4", MASTER_PORT="29777")
    os.execv(sys.executable, [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"])
"""


def test_stale_processes_are_named_and_left_alone() -> None:
    """A rank whose launcher has ended: pid, rank, port and command; it is alive afterwards."""
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        parent.wait()
        assert parent.stdout.readline() == "up\n"
        found = text_of(network.stale_processes, make_facts(environ={"MASTER_PORT": "29777"}))
        line = next(line for line in found.splitlines() if "rank 3 of 4, port 29777, this job's port" in line)
        pid = int(line.split()[1])
        try:
            assert f"{sys.executable} -c import time" in line
            os.kill(pid, 0)
        finally:
            os.kill(pid, signal.SIGKILL)
    assert "port 29777" not in text_of(network.stale_processes, make_facts())
