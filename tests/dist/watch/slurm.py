# SPDX-License-Identifier: Apache-2.0
"""A Slurm of two nodes on this machine, with daemons of its own."""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.dist.launching.scripts import wait_until

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))

_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """The programs that are not installed here: Debian has them as slurm-wlm and munge."""
    return [name for name in NEEDED if shutil.which(name, path=_PATH) is None]


def _free_ports(num: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(num)]
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def running_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The variables with which `srun` finds it; its nodes are n1 and n2. Ends its daemons afterwards."""
    values = {"host": platform.node(), "user": getpass.getuser(), "folder": folder}
    (folder / "slurm.conf").write_text(_CONF.format(**values, ports=_free_ports(3)))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    for name in ("state", "spool.n1", "spool.n2"):
        (folder / name).mkdir()
    files = {"socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "munged.seed"}
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    commands = (
        ["munged", "--foreground", "--force", f"--key-file={key}", *options],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    )
    variables = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
    with ExitStack() as stack:
        for command in commands:
            if command[0] == "slurmctld":
                wait_until((folder / "munge.socket").exists)
            stack.enter_context(_daemon(command, variables, folder))
        wait_until(lambda: _states(variables) == ["idle", "idle"], limit_s=60)
        yield variables


@contextmanager
def _daemon(command: list[str], variables: dict[str, str], folder: Path) -> Iterator[None]:
    program = shutil.which(command[0], path=_PATH)
    assert program is not None
    with open(folder / f"{command[0]}.out", "ab") as out:
        process = subprocess.Popen(
            [program, *command[1:]], env=os.environ | variables, stdout=out, stderr=out, stdin=subprocess.DEVNULL
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _states(variables: dict[str, str]) -> list[str]:
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.split()
