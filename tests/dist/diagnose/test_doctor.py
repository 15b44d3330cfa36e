# SPDX-License-Identifier: Apache-2.0
"""`doctor` on this machine: with real ranks that are healthy, and with real faults of machine, ranks and values."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddpilot.diagnose import doctor as module
from ddpilot.diagnose.doctor import doctor
from ddpilot.diagnose.ranks import check_values, examine_rank
from ddpilot.findings.finding import Finding
from ddpilot.launching.rank_environment import count_cores
from tests.dist.forked import start_forked
from tests.dist.in_process import Run, run_command
from tests.dist.launching.scripts import finish, started
from tests.dist.run.commands import TORCHRUN
from tests.ports import kept_port

__all__ = ["run_command"]

SLOW = "DDP807"
"""Speed is judged on a busy machine, too."""


def codes(found: Any) -> set[str]:
    """Codes of the findings of a diagnosis, but for speed."""
    return {finding.code for finding in found.findings} - {SLOW}


def run_doctor(
    *words: object, environ: Mapping[str, str] | None = None, around: tuple[object, ...] = ()
) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of `ddpilot doctor`, which is forked from this process if nothing is `around` it."""
    command = [*map(str, around), sys.executable, "-m", "ddpilot", "doctor", "--json", *map(str, words)]
    env = {**os.environ, **(environ or {})}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    start = functools.partial(subprocess.Popen, command, env=env, text=True)
    with start(**streams) if around else start_forked(command, env, **streams) as process:
        shown, errors = process.communicate(timeout=100)
    assert shown, errors
    return process.returncode, json.loads(shown)


def found_by_check(report: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Code and text of each finding, by check."""
    lines = report["lines"]
    return {line["check"]: (line["finding"]["code"], line["found"]) for line in lines if line["finding"]}


@pytest.mark.timeout(120)
def test_a_healthy_machine_has_no_error_and_its_ranks_are_measured(tmp_path: Path) -> None:
    """Two ranks join, get right values, and exchange data; every rank reports; nothing is left in the folder."""
    found = doctor(nproc_per_node=2, num_workers=0, checkpoint_dir=tmp_path)
    assert found.exit_status == 0, str(found)
    lines = {line.check: str(line.answer) for line in found.lines}
    assert lines["joined"].startswith("2 ranks joined in ")
    assert lines["joined"].endswith(" s on cpu over gloo")
    assert lines["values"] == "all_reduce, broadcast and gather_object are right on ranks 0,1"
    assert f"torch {torch.__version__}" in lines["versions"]
    assert "8 B " in lines["all_reduce_speed"]
    assert "16.0 MB " in lines["all_reduce_speed"]
    assert "0-1 " in lines["pair_speed"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
def test_three_ranks_measure_every_pair(tmp_path: Path) -> None:
    """Pairs 0-1, 0-2 and 1-2."""
    found = doctor(nproc_per_node=3, num_workers=0, checkpoint_dir=tmp_path)
    (speed,) = [line.answer for line in found.lines if line.check == "pair_speed"]
    text = "\n".join(speed.evidence) if isinstance(speed, Finding) else speed
    assert all(f"{pair} " in text for pair in ("0-1", "0-2", "1-2"))


def test_without_live_ranks_the_process_stays_free_of_torch(tmp_path: Path) -> None:
    """On a login node, in well under a second of the process's own time."""
    code = (
        "import sys; from ddpilot.diagnose.doctor import doctor\n"
        "found = doctor(live=False); print(found); sys.exit(found.exit_status + 2 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not started" in done.stdout
    assert "joined" not in done.stdout


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A loopback port on which a process listens."""
    with kept_port() as port, socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        code = "import sys; print('up', flush=True); sys.stdin.read()"
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(listener.fileno(),)
        )
        assert child.stdout is not None
        child.stdout.readline()
        yield port
        child.communicate(b"")


@pytest.mark.timeout(120)
def test_faults_of_a_machine_are_found_together_and_its_ranks_still_run(tmp_path: Path, busy_port: int) -> None:
    """Wrong host name, busy port, tiny /dev/shm, low ulimit, full disk, wrong interface, bad combination; status 1."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0:
        pytest.skip("this user may not make mount namespaces")
    script = (
        "mount -t tmpfs -o size=1m tmpfs /dev/shm && mount -t tmpfs -o size=1m tmpfs $0 && "
        'head -c 1048576 /dev/zero > $0/data && ulimit -n 1000 && exec "$@"'
    )
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(busy_port)}
    status, report = run_doctor(
        *("-n", 2, "--checkpoint-dir", tmp_path),
        around=("unshare", "-m", "sh", "-c", script, tmp_path),
        environ={
            **job,
            "MASTER_ADDR": "no-such-host.invalid",
            "NCCL_SOCKET_IFNAME": "eth77",
            "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        },
    )
    found = found_by_check(report)
    assert status == 1
    assert found["master_address"][0] == "DDP104"
    assert found["master_port"][0] == "DDP103"
    assert "the port is taken by pid" in found["master_port"][1]
    assert found["shared_memory"][0] == "DDP601"
    assert found["open_files"][0] == "DDP801"
    assert found["checkpoint_space"][0] == "DDP806"
    assert found["checkpoint_write"][0] == "DDP806"
    assert found["interfaces"][0] == "DDP107"
    assert found["combinations"][0] == "DDP606"
    assert "values" not in found
    assert report["errors"] == len([line for line in report["lines"] if line["status"] == "error"])


@pytest.mark.timeout(120)
def test_a_rank_that_never_comes_is_named() -> None:
    """Rank 0 of 2 alone, as srun starts it: rank 1 is missing after the time that it may take."""
    with kept_port() as port:
        job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        job |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        status, report = run_doctor("--nodes", "--timeout-s", 2, environ=job)
    code, text = found_by_check(report)["joined"]
    assert (status, code) == (1, "DDP105")
    assert text.startswith("rank 1 of 2 did not come within 2 s; there are rank 0 (")


TWICE_AND_COMMAND = """
import os, runpy, sys
import ddpilot
before = dict(os.environ)
found = [ddpilot.doctor(nodes=True, checkpoint_dir=os.environ["FOLDER"]) for _ in range(2)]
assert dict(os.environ) == before
assert found[0].ranks != found[1].ranks
assert [len(each.ranks) for each in found] == [2, 2]
print("rank", os.environ["RANK"], [each.exit_status for each in found], found[0].is_shown, flush=True)
sys.argv = ["ddpilot", "doctor", "--nodes", "--json"]
runpy.run_module("ddpilot", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any]]:
    """What a job of torchrun prints, and the report of the command: on its ranks the function runs twice, and then
    the command, as by `torchrun -m ddpilot doctor`.
    """
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "twice.py").write_text(TWICE_AND_COMMAND)
    words = ["--standalone", "--nproc-per-node", "2", "twice.py"]
    with started([*TORCHRUN, *words], folder, {**os.environ, "FOLDER": str(folder)}) as process:
        done = finish(process, 120)
    assert done.code == 0, done.out + done.err
    lines = done.out.splitlines()
    is_of_script = [line.startswith("rank ") for line in lines]
    report = "\n".join(line for line, is_it in zip(lines, is_of_script, strict=True) if not is_it)
    return [line for line, is_it in zip(lines, is_of_script, strict=True) if is_it], json.loads(report)


@pytest.mark.timeout(150)
def test_ranks_of_torchrun_are_one_job_of_which_rank_0_speaks(
    under_torchrun: tuple[list[str], dict[str, Any]],
) -> None:
    """One JSON report, and status 0; the port is that of torchrun's agent."""
    _, report = under_torchrun
    lines = {line["check"]: line["found"] for line in report["lines"]}
    assert report["title"] == "doctor: 2 ranks on 1 node"
    assert lines["topology"].startswith("rank 0 of 2 on 1 node(s): torchrun's variables: RANK=0, WORLD_SIZE=2")
    assert lines["master_port"].endswith("is the launcher's")
    assert lines["joined"].startswith("2 ranks joined")


@pytest.mark.timeout(150)
def test_the_function_returns_the_same_on_all_ranks_and_can_be_called_again(
    under_torchrun: tuple[list[str], dict[str, Any]],
) -> None:
    """In a script under torchrun; variables stay as they were."""
    printed, _ = under_torchrun
    assert sorted(printed) == ["rank 0 [0, 0] True", "rank 1 [0, 0] False"]


@pytest.mark.timeout(150)
def test_tasks_of_srun_are_one_job_without_torchruns_variables() -> None:
    """Slurm's variables of a step of two tasks on this machine; each rank of torch uses all cores, a warning."""
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    sizes = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_NODES": "1"}
    threads = {"SLURM_NODEID": "0", "OMP_NUM_THREADS": str(count_cores())}
    command = [sys.executable, "-m", "ddpilot", "doctor", "--nodes", "--json"]
    tasks = [
        subprocess.Popen(
            command,
            env={**os.environ, **job, **sizes, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, **threads},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "10"
    ]
    texts = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0]
    assert texts[0] == ""
    lines = {line["check"]: line["found"] for line in json.loads(texts[1])["lines"]}
    assert "srun set SLURM_PROCID=0" in lines["topology"]
    assert f"2 ranks of torch use {2 * count_cores()} threads on {count_cores()} cores" in lines["threads"]
    assert lines["joined"].startswith("2 ranks joined")


@pytest.mark.timeout(150)
def test_a_rank_that_loses_rank_0_says_so() -> None:
    """Ranks 0 and 1 of 3 wait for the third one, and rank 0 is killed."""
    with kept_port() as port:
        job = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        job |= {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "ddpilot", "doctor", "--nodes", "--timeout-s", "60", "--json"]
        ranks = [
            start_forked(
                command,
                # Rank 1 speaks for a node of its own.
                {**os.environ, **job, "RANK": rank, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
                stdout=subprocess.PIPE,
            )
            for rank in "01"
        ]
        while not has_accepted(ranks[0].pid, ranks[1].pid, port):
            assert ranks[1].poll() is None
            time.sleep(0.1)
        time.sleep(0.5)
        ranks[0].kill()
        ranks[0].communicate()
        text, _ = ranks[1].communicate(timeout=100)
    assert ranks[1].returncode == 1
    code, said = found_by_check(json.loads(text))["store"]
    assert code == "DDP209"
    assert said.startswith("rank 1 lost the store of rank 0")


def has_accepted(server: int, client: int, port: int) -> bool:
    """True if the process `server`, which listens on `port`, has accepted a connection of the process `client`."""
    own = {getattr(each.laddr, "port", 0) for each in psutil.Process(client).net_connections("tcp")}
    accepted = psutil.Process(server).net_connections("tcp")
    return any(getattr(each.raddr, "port", -1) in own and each.laddr.port == port for each in accepted)


def test_a_rank_is_told_to_use_nodes(run_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ddpilot doctor` under srun would start ranks in each task: status 2, and what to type."""
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a", "SLURM_STEP_NUM_TASKS": "2"}
    task = {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    for name, value in (job | task).items():
        monkeypatch.setenv(name, value)
    done = run_command("doctor")
    assert done.returncode == 2
    assert "this process is itself a rank: srun set SLURM_PROCID=0" in done.stderr
    assert "`ddpilot doctor --nodes`" in done.stderr


@pytest.mark.timeout(150)
def test_a_slow_link_is_found_for_the_group_and_the_pair(tmp_path: Path) -> None:
    """Loopback of a network namespace with 400 Mb/s, which is 50 MB/s for both directions together."""
    script = 'ip link set lo up && tc qdisc add dev lo root tbf rate 400mbit burst 256kb latency 50ms && exec "$@"'
    around = ("unshare", "-n", "sh", "-c", script, "sh")
    if subprocess.run([*around, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("network namespaces with a limited rate cannot be made here")
    status, report = run_doctor("-n", 2, "--workers", 0, "--checkpoint-dir", tmp_path, around=around)
    found = found_by_check(report)
    assert status == 0
    for check in ("all_reduce_speed", "pair_speed"):
        assert found[check][0] == SLOW
        assert "MB/s, where gloo over loopback gives 100.0 MB/s or more" in found[check][1]


def sleep_on_rank_1() -> Any:
    """A rank that comes after the others have given up."""
    if os.environ["RANK"] == "1":
        time.sleep(6)
    return examine_rank(3.0)


def die_on_rank_1() -> Any:
    """A rank that is killed before it joins."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return examine_rank(20.0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("function", "code", "said"),
    [(sleep_on_rank_1, "DDP105", "rank 1 did not join within 3 s"), (die_on_rank_1, "DDP209", "SIGKILL")],
)
def test_a_started_rank_that_is_late_or_killed_is_named(
    function: Callable[[], Any], code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other checks are there all the same."""
    monkeypatch.setattr(module, "_examine", function)
    found = doctor(nproc_per_node=2, num_workers=0, checkpoint_dir=tmp_path)
    (finding,) = [line.answer for line in found.lines if line.check == "joined"]
    assert isinstance(finding, Finding)
    assert (finding.code, finding.severity) == (code, "error")
    assert said in finding.summary
    assert found.exit_status == 1
    assert len(found.lines) > 15


def test_wrong_values_are_found_with_a_backend_that_exchanges_nothing() -> None:
    """torch's "fake" backend returns at once and leaves every tensor as it was."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        wrong = check_values(SimpleNamespace(rank=0, world_size=2, device=torch.device("cpu")))  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
    assert "all_reduce of 1 numbers: 1, not 3" in wrong
    assert "broadcast from rank 1: 0, not 1" in wrong
    assert any(text.startswith("gather_object: ") for text in wrong)
