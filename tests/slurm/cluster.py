# SPDX-License-Identifier: Apache-2.0
"""A real Slurm on this machine: munged, one slurmctld, and a slurmd in each of several network namespaces.

Each node has its own network (10.x.y.1 and up, joined by a bridge), host name and /etc/hosts; files are shared, as on a
cluster with a shared file system. Everything is private to one `Cluster`: daemons, key, namespaces and folder are
removed by `close`. `python -m tests.slurm.cluster FOLDER [NODES]` runs one until Ctrl-C and prints its variables; it
keeps accounts (`sacct`) if slurmdbd and MariaDB are installed.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import platform
import random
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.slurm import accounting

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "ip", "nsenter", "unshare")
PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))
NUM_CPUS = 16
NUM_GPUS = 4
PARTITIONS = ("all", "low", "urgent")
"""Jobs of partition `urgent` preempt those of `low`, which are requeued 5 s after their SIGTERM."""
CGROUPS = Path("/sys/fs/cgroup")
_GONE_S = 20.0
_EXEC = 'exec "$@"'

_CONF = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits as long as a credential is valid, so that is short.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/finished_jobs.txt
ProctrackType=proctrack/linuxproc
TaskPlugin={task_plugin}
JobAcctGatherType=jobacct_gather/{gather}
MpiDefault=none
ReturnToService=2
SlurmdTimeout=15
MessageTimeout=4
TCPTimeout=2
InactiveLimit=0
KillWait=5
MinJobAge=600
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=2,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters={select}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=5
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
_NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr={address} CPUs={cpus} RealMemory=16000 Gres=gpu:{gpus} Feature=fake"
)


def why_not() -> str:
    """Why no cluster can be started here; "" if one can."""
    missing = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    if missing:
        return f"a Slurm needs programs that are not installed here: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "a Slurm of several nodes needs root, for network namespaces"
    name = f"ddp{uuid.uuid4().hex[:6]}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        return f"network namespaces cannot be made here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)
    return ""


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _wait_until(is_so: Callable[[], bool], what: str, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not so within {limit_s:g} s")
        time.sleep(0.05)


def _free_ports() -> tuple[int, int]:
    """Two ports that nothing listens on."""
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


def _free_network() -> ipaddress.IPv4Network:
    """A /24 of 10.64.0.0/10 that no interface of this machine has."""
    used = _ip("-4", "-o", "addr")
    while True:
        prefix = f"10.{random.SystemRandom().randrange(64, 128)}.{random.SystemRandom().randrange(256)}."
        if prefix not in used:
            return ipaddress.IPv4Network(f"{prefix}0/24")


class Cluster:
    """A Slurm of nodes n1, n2, ...; `variables` make its commands (sbatch, srun, ...) find it from this process.

    This process is on the login node, which is also the controller's: `login_address` on the nodes' network.
    `limits_memory`: the kernel kills tasks that use more than they have asked for; it needs cgroups of version 1.
    `keeps_accounts`: sacct knows the jobs, by a slurmdbd; see `accounting.why_not` before.
    """

    def __init__(
        self, folder: Path, *, num_nodes: int = 4, limits_memory: bool = False, keeps_accounts: bool = False
    ) -> None:
        self.folder = folder
        self.nodes = tuple(f"n{i + 1}" for i in range(num_nodes))
        network = list(_free_network().hosts())
        self.addresses = dict(zip(self.nodes, map(str, network), strict=False))
        self.login_address = str(network[-1])
        self.login_host = platform.node()
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
        unique = uuid.uuid4().hex[:6]
        self._limits_memory = limits_memory
        self._keeps_accounts = keeps_accounts
        self._bridge = f"b{unique}"
        self._namespaces = {node: f"ddp{unique}{node}" for node in self.nodes}
        self._cables = {node: f"v{unique}{node}" for node in self.nodes}
        self._keeper: subprocess.Popen[str] | None = None

    # Start and end

    def open(self) -> None:
        """Start everything; returns when all nodes are idle. Call `close` also if this raises."""
        self._open_network()
        self._write_files()
        self._start("munged", self._munged_words())
        _wait_until((self.folder / "munge.socket").exists, "munged listens", 20)
        if self._keeps_accounts:
            self._open_accounts()
        self._start("slurmctld", ["slurmctld", "-D", "-c"])
        for node in self.nodes:
            self.start_node(node)
        self.wait_idle()

    def _open_accounts(self) -> None:
        self._start("mariadbd", accounting.mariadb_words(self.folder))
        _wait_until(accounting.socket_path(self.folder).exists, "MariaDB listens", 20)
        self._start("slurmdbd", ["env", f"MYSQL_UNIX_PORT={accounting.socket_path(self.folder)}", "slurmdbd", "-D"])
        add = ("sacctmgr", "--immediate", "add", "cluster", "test")
        _wait_until(lambda: self.run(*add, check=False).returncode == 0, "slurmdbd knows the cluster", 20)

    def _open_network(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.login_address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for node, namespace in self._namespaces.items():
            cable = self._cables[node]
            _ip("netns", "add", namespace)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", cable, "master", self._bridge, "up")
            _ip("-n", namespace, "addr", "add", f"{self.addresses[node]}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            _ip("-n", namespace, "route", "add", "default", "via", self.login_address)

    def _write_files(self) -> None:
        port, accounts_port = _free_ports()
        numbers = {"cpus": NUM_CPUS, "gpus": NUM_GPUS}
        lines = [_NODE.format(name=node, address=self.addresses[node], **numbers) for node in self.nodes]
        values = {"host": self.login_host, "address": self.login_address, "port": port, "folder": self.folder}
        kinds = ("task/none", "none", "CR_CPU")
        if self._limits_memory:
            kinds = ("task/cgroup", "cgroup", "CR_CPU_Memory")
            (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n")
        values |= dict(zip(("task_plugin", "gather", "select"), kinds, strict=True))
        text = _CONF.format(**values, nodes="\n".join(lines))
        if self._keeps_accounts:
            place = self.login_address
            text += accounting.SLURM_CONF.format(address=place, port=accounts_port, folder=self.folder)
            accounting.prepare(self.folder, host=self.login_host, address=place, port=accounts_port)
        (self.folder / "slurm.conf").write_text(text)
        for i in range(NUM_GPUS):  # like /dev/null: nothing opens them, but Slurm wants a device file for each GPU
            os.mknod(self.folder / f"gpu{i}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{NUM_GPUS - 1}]\n")
        hosts = ["127.0.0.1 localhost", f"{self.login_address} {self.login_host}"]
        hosts += [f"{address} {node}" for node, address in self.addresses.items()]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        (self.folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for name in ("state", *(f"spool.{node}" for node in self.nodes)):
            (self.folder / name).mkdir()

    def _munged_words(self) -> list[str]:
        files = {
            "socket": "munge.socket",
            "pid-file": "munged.pid",
            "log-file": "munged.log",
            "seed-file": "munged.seed",
        }
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        return ["munged", "--foreground", "--force", f"--key-file={self.folder / 'munge.key'}", *options]

    def _start(self, name: str, words: Sequence[str]) -> None:
        """Start a daemon as a child of the keeper, which collects it: a test may restart one and leaves no child."""
        if self._keeper is None:
            # Not a word of a test's own environment: jobs get theirs from sbatch and srun.
            environ = {"LANG": "C.UTF-8", "HOME": os.environ.get("HOME", "/"), **self.variables}
            self._keeper = subprocess.Popen(["bash"], stdin=subprocess.PIPE, env=environ, cwd=self.folder, text=True)
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(f"{shlex.join(words)} </dev/null >>{self.folder}/{name}.out 2>&1 &\n")
        self._keeper.stdin.flush()

    def close(self) -> None:
        """End all jobs, daemons and processes of the nodes, and remove the namespaces."""
        for node in self.nodes:
            with suppress(RuntimeError):
                self._kill_all(node)
        daemons = ("slurmctld", "slurmdbd", "mariadbd", "munged")
        for name in daemons:
            self._signal(name, signal.SIGTERM)
        if self._keeper is not None:
            with suppress(subprocess.TimeoutExpired):
                self._keeper.communicate("exec 2>/dev/null; wait\n", timeout=_GONE_S)
            for name in daemons:
                self._signal(name, signal.SIGKILL)
            self._keeper.wait(_GONE_S)
        if self._limits_memory:
            for node, kind in itertools.product(self.nodes, ("memory", "cpuacct")):
                with suppress(OSError):
                    (CGROUPS / kind / f"slurm_{node}").rmdir()
        for namespace in self._namespaces.values():
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=20, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, timeout=20, check=False)

    def _signal(self, name: str, number: int) -> int:
        """Send a signal (0: none) to a daemon by the pid that it wrote; the pid, or 0 if it is not running."""
        try:
            pid = int((self.folder / f"{name}.pid").read_text())
            program = Path(f"/proc/{pid}/comm").read_text().strip()
        except (OSError, ValueError):
            return 0
        if program != name.partition(".")[0]:
            return 0
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid

    # Nodes

    def node_pids(self, node: str) -> list[int]:
        """Every process on `node`, its slurmd included."""
        return list(map(int, _ip("netns", "pids", self._namespaces[node]).split()))

    def job_pids(self, node: str) -> list[int]:
        """Every process of jobs on `node`, without Slurm's own.

        A slurmstepd whose ranks have ended may stay for minutes after a cut link: it reports their end again and again.
        """
        names = {pid: Path(f"/proc/{pid}/comm") for pid in self.node_pids(node)}
        return [pid for pid, name in names.items() if _read_name(name) not in ("", "slurmd", "slurmstepd")]

    def start_node(self, node: str) -> None:
        """Start the slurmd of `node`."""
        self._start(f"slurmd.{node}", [*self.on_node(node), "slurmd", "-D", "-N", node])

    def kill_slurmd(self, node: str) -> None:
        """Kill the slurmd of `node`; its tasks go on. Slurm takes the node for down after 5 to 30 s."""
        pid = self._signal(f"slurmd.{node}", signal.SIGKILL)
        _wait_until(lambda: pid not in self.node_pids(node), f"the slurmd of {node} is gone", _GONE_S)

    def kill_node(self, node: str) -> None:
        """Kill everything on `node`, as a power failure does: no connection is closed. Down after 5 to 30 s."""
        self.cut(node)
        self._kill_all(node)

    def _kill_all(self, node: str) -> None:
        end = time.monotonic() + _GONE_S
        while (pids := self.node_pids(node)) and time.monotonic() < end:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def cut(self, node: str) -> None:
        """Pull the network cable of `node`."""
        _ip("link", "set", self._cables[node], "down")

    def mend(self, node: str) -> None:
        """Put the network cable of `node` in again."""
        _ip("link", "set", self._cables[node], "up")

    def on_node(self, node: str) -> list[str]:
        """Words in front of a command that runs it on `node`, with its network, host name and /etc/hosts."""
        enter = ["nsenter", f"--net=/run/netns/{self._namespaces[node]}"]  # `ip netns exec` would hide /sys/fs/cgroup
        return [
            *enter,
            "unshare",
            "--mount",
            "--uts",
            "sh",
            "-c",
            f"{self._mounts()} && hostname {node} && {_EXEC}",
            "sh",
        ]

    def on_login(self) -> list[str]:
        """Words in front of a command that runs it on the login node, where the nodes' names resolve."""
        return ["unshare", "--mount", "sh", "-c", f"{self._mounts()} && {_EXEC}", "sh"]

    def _mounts(self) -> str:
        """Names come from a file alone: a node reaches no name server, and would wait 10 s for one."""
        return " && ".join(f'mount --bind "{self.folder}/{name}" /etc/{name}' for name in ("hosts", "nsswitch.conf"))

    def forget_jobs(self) -> None:
        """Start slurmctld again without what it knew about jobs, as it forgets them minutes after their end."""
        pid = self._signal("slurmctld", signal.SIGTERM)
        _wait_until(lambda: not Path(f"/proc/{pid}").exists(), "slurmctld has ended", _GONE_S)
        with open(self.folder / "slurm.conf", "a") as file:
            file.write("FirstJobId=1001\n")
        self._start("slurmctld", ["slurmctld", "-D", "-c"])
        _wait_until(lambda: self.run("scontrol", "ping", check=False).returncode == 0, "slurmctld listens", 20)

    # Commands and jobs

    def environ(self) -> dict[str, str]:
        """The variables of this process, with those of the cluster."""
        return os.environ | self.variables

    def run(
        self, *words: object, check: bool = True, cwd: Path | None = None, timeout_s: float = 60.0, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node to its end; with `check`, RuntimeError with its output if it fails."""
        done = subprocess.run(
            list(map(str, words)),
            env=self.environ() | environ,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{words} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def state(self, job_id: object) -> str:
        """The state of a job, such as RUNNING; "" if Slurm does not know it."""
        done = self.run("scontrol", "--oneliner", "show", "job", job_id, check=False)
        return next((word.removeprefix("JobState=") for word in done.stdout.split() if "JobState=" in word), "")

    def wait_for(self, job_id: object, states: Collection[str], *, limit_s: float = 60.0) -> str:
        """Wait until a job is in one of `states`; the state."""
        _wait_until(lambda: self.state(job_id) in states, f"job {job_id} is {' or '.join(states)}", limit_s)
        return self.state(job_id)

    def wait_idle(self, *, limit_s: float = 60.0) -> None:
        """Wait until all nodes are idle: no job runs or completes."""
        want = ["idle"] * len(self.nodes)
        command = ("sinfo", "--noheader", "--Node", "--partition=all", "--format=%T")
        try:
            _wait_until(lambda: self.run(*command, check=False).stdout.split() == want, "all nodes are idle", limit_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.run('sinfo', '-lN', check=False).stdout}{self.logs()}") from None

    def wait_freed(self, *, limit_s: float = 60.0) -> None:
        """Wait until no job is completing, so that the next one is given the first nodes that no job runs on."""
        command = ("squeue", "--noheader", "--states=completing")
        _wait_until(lambda: not self.run(*command).stdout.strip(), "no job is completing", limit_s)

    def bring_back(self) -> None:
        """Put all cables in, and start the slurmd of each node that has none."""
        for node in self.nodes:
            self.mend(node)
            if not self._signal(f"slurmd.{node}", 0):
                self.start_node(node)

    def cancel_all(self) -> None:
        """Cancel all jobs, bring failed nodes back, and wait until all are idle: for the end of a test."""
        self.run("scancel", "--user=root", check=False)
        self.bring_back()
        down = ("sinfo", "--noheader", "--Node", "--partition=all", "--states=down,drain", "--format=%N")
        _wait_until(lambda: not self.run("squeue", "--noheader").stdout, "all jobs have ended", 3 * _GONE_S)
        for node in self.run(*down).stdout.split():
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        self.wait_idle()

    def logs(self) -> str:
        """The last lines of the daemons' logs, for the message of a failed test."""
        names = ("slurmctld", *(f"slurmd.{node}" for node in self.nodes))
        files = [self.folder / f"{name}.log" for name in names]
        return "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in files if file.exists())


def _read_name(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the process has ended
        return ""


@contextmanager
def running_cluster(folder: Path, *, num_nodes: int = 4, keeps_accounts: bool = False) -> Iterator[Cluster]:
    """A cluster with its daemons in `folder`, closed afterwards. See `why_not` before."""
    cluster = Cluster(folder, num_nodes=num_nodes, keeps_accounts=keeps_accounts)
    try:
        cluster.open()
        yield cluster
    finally:
        cluster.close()


def _main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    num_nodes = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    with running_cluster(folder, num_nodes=num_nodes, keeps_accounts=not accounting.why_not(PATH)) as cluster:
        print("\n".join(f"export {name}={value}" for name, value in cluster.variables.items()), flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    _main()
