# SPDX-License-Identifier: Apache-2.0
"""Scripts that are watched: of `ddpilot run`, and of torchrun, by a word in the script or by a variable."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import ddpilot
from ddpilot.watch.external.instrumentation import enable_from_environment
from ddpilot.watch.job_folder import JOBS_VARIABLE, list_jobs
from tests.dist.launching.scripts import Outcome, finish, run_script, running, wait_until
from tests.dist.run.commands import environment, run, run_with_fresh_ranks, write
from tests.soak import often

RUN = ("-m", "ddpilot", "run", "-n", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
ENABLE = "import ddpilot.watch\nddpilot.watch.enable()\n"
ENTER = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(3):
    dist.all_reduce(torch.ones(1))
"""
DIFFER = f"{ENTER}if rank:\n    dist.barrier()\nelse:\n    dist.all_reduce(torch.ones(2))\n"
LEAVE = f"{ENTER}dist.destroy_process_group()\n"


def variables(folder: Path) -> dict[str, str]:
    """Without those of a launcher; jobs have their folders in `folder`."""
    sources = os.pathsep.join((str(Path(ddpilot.__file__).parents[1]), os.environ["PYTHONPATH"]))
    return environment(**{JOBS_VARIABLE: str(folder / "jobs"), "PYTHONPATH": sources, "TMPDIR": str(folder)})


def run_here(source: str, folder: Path, *options: str, **more: str) -> Outcome:
    """`ddpilot run` of two ranks with this process as their parent; the job has its folder in `folder`."""
    write(folder, "script.py", source)
    return run(folder, "-n", 2, *options, "script.py", **{JOBS_VARIABLE: str(folder / "jobs"), **more})


def observers(folder: Path) -> list[int]:
    """Observers of jobs in `folder` that run."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or ())
        and "ddpilot.watch.external.observer_process" in " ".join(process.info["cmdline"])
    ]


def test_ranks_that_end_by_os_exit_0_one_after_the_other_end_well(tmp_path: Path) -> None:
    """Many scripts do so; the observer sees no exit status, and must not end the ranks that are left."""
    script = f"{ENABLE}{ENTER}if rank:\n    time.sleep(1.5)\nprint('through')\nsys.stdout.flush()\nos._exit(0)\n"
    done = run_script(script, tmp_path, module=TORCHRUN, env=variables(tmp_path))
    assert done.out.count("through") == 2
    assert "ddpilot: " not in done.err


def test_run_ends_with_the_finding_and_status_1(tmp_path: Path) -> None:
    """As `launch` does; with --no-watch nobody sees it."""
    done = run_here(DIFFER, tmp_path)
    assert done.code == 1
    assert "ddpilot: [rank " in done.err
    assert "desync (DDP201): collective #3 of the default group differs between ranks" in done.err
    assert "script.py:" in done.err
    (job,) = list_jobs(tmp_path / "jobs")
    assert job[1].name == "script.py"
    assert not job[1].is_running
    counts = f"import os\nprint(len(os.listdir({str(tmp_path / 'jobs')!r})), os.environ.get('DDPILOT_WATCH'))\n"
    quiet = run_here(counts, tmp_path, "--no-watch")
    assert (quiet.code, quiet.err) == (0, "")
    assert quiet.out.split()[-2:] == ["1", "None"]


def test_run_imports_no_torch_before_the_script_does(tmp_path: Path) -> None:
    """A script may set what torch reads when it is imported; one that never imports it is not recorded."""
    text = "import sys\nprint('torch' in sys.modules, 'torch.distributed' in sys.modules)\n"
    write(tmp_path, "script.py", text)
    done = run_with_fresh_ranks(tmp_path, "-n", 2, "script.py", **{JOBS_VARIABLE: str(tmp_path / "jobs")})
    assert done.out.split()[-2:] == ["False", "False"]
    assert done.err == ""


def test_enable_has_torchruns_ranks_observed(tmp_path: Path) -> None:
    """The report comes on stderr, the ranks are ended, the status is not 0, and nobody observes any more."""
    done = run_script(ENABLE + DIFFER, tmp_path, module=TORCHRUN, env=variables(tmp_path), may_fail=True)
    assert done.code == 1
    assert "ddpilot: desync  DDP201  collective #3 of the default group differs between ranks" in done.err
    assert "terminating the ranks of this node" in done.err
    wait_until(lambda: not observers(tmp_path), limit_s=10)
    ((folder, about),) = list_jobs(tmp_path / "jobs")
    assert (about.name, about.ranks, about.is_running) == ("script.py", (0, 1), False)
    assert "DDP201" in (folder / "report.txt").read_text()


@pytest.mark.usefixtures("collects_at_exit")
def test_enable_leaves_nothing_of_a_job_that_ends_well(tmp_path: Path) -> None:
    """Neither a folder nor a process, nor a word."""
    done = run_script(ENABLE + LEAVE, tmp_path, module=TORCHRUN, env=variables(tmp_path))
    assert "ddpilot" not in done.err
    wait_until(lambda: not observers(tmp_path), limit_s=10)
    assert list_jobs(tmp_path / "jobs") == []


@often("report-0")  # of ranks that are ended, those of `enable` above
@pytest.mark.parametrize(("action", "status"), [("report", 0), ("stop", 1)])
def test_variable_watches_a_script_that_knows_nothing_of_it(action: str, status: int, tmp_path: Path) -> None:
    """The line that the installation puts beside the package, in a folder that Python reads such files of.

    Numbers that are silently wrong are only reported, and the job ends well; or the job is ended before it would.
    """
    wrong = "dist.all_reduce(torch.ones(1), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)\n"
    # The script ends by itself once the finding is reported, or waits for the signal.
    told = f"import glob\nwhile not glob.glob({str(tmp_path)!r} + '/jobs/*/report.txt'):\n    time.sleep(0.05)\n"
    text = f"{ENTER}{wrong}{told}{'time.sleep(60)' if status else ''}\ndist.destroy_process_group()\n"
    site = tmp_path / "site"
    site.mkdir()
    line = next(text for text in Path("setup.py").read_text().splitlines() if text.startswith("LINE = "))
    (site / "ddpilot_watch.pth").write_text(line.removeprefix('LINE = "').removesuffix('\\n"') + "\n")
    (site / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(site)!r})\n")
    env = variables(tmp_path)
    env |= {"PYTHONPATH": os.pathsep.join((str(site), env["PYTHONPATH"])), "DDPILOT_WATCH": "1"}
    done = run_script(text, tmp_path, module=TORCHRUN, env={**env, "DDPILOT_ON_FINDING": action}, may_fail=True)
    assert done.code == status
    assert "DDP204" in done.err
    wait_until(lambda: not observers(tmp_path), limit_s=10)


def test_variable_that_cannot_be_meant_is_told_and_in_nobodys_way(capfd: pytest.CaptureFixture[str]) -> None:
    """Training goes on, unwatched."""
    enable_from_environment({"DDPILOT_WATCH": "1", "DDPILOT_ON_FINDING": "explode"})
    said = capfd.readouterr().err
    assert said.startswith("ddpilot: this job is not watched: reading DDPILOT_ON_FINDING: 'explode'. Set it to report ")


def test_watch_explains_a_job_whose_parent_was_killed(tmp_path: Path) -> None:
    """From the rings alone, which outlive everybody: also who was waited for, and where."""
    text = f"{ENTER}print('entered', flush=True)\nif rank:\n    time.sleep(600)\ndist.barrier()\n"
    with running(text, tmp_path, module=RUN, env=variables(tmp_path)) as process:
        wait_until(lambda: len(list((tmp_path / "jobs").glob("*/rank*.ring"))) == 2, limit_s=60)
        ((folder, about),) = list_jobs(tmp_path / "jobs")
        wait_until(lambda: (folder / "report.txt").exists(), limit_s=60)  # it has been said that rank 0 waits
        process.send_signal(signal.SIGKILL)
        finish(process)
    command = [sys.executable, "-m", "ddpilot", "watch"]
    listed = subprocess.run(command, env=variables(tmp_path), capture_output=True, text=True, timeout=60, check=True)
    assert f"{about.id}  ended" in listed.stdout
    explained = subprocess.run(
        [*command, about.id], env=variables(tmp_path), capture_output=True, text=True, timeout=60, check=False
    )
    assert "has ended, not cleanly" in explained.stdout
    assert "script.py:" in explained.stdout


def test_run_goes_on_when_the_disk_is_full(tmp_path: Path) -> None:
    """With room for one ring: who has none says in a line that it does not record, and trains."""
    full = tmp_path / "full"
    full.mkdir()
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", full], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system; of a limit on files other tests know")
    script = tmp_path / "script.py"
    script.write_text(LEAVE + "print('through', flush=True)\n")
    command = f"mount -t tmpfs -o size=4m tmpfs '{full}' && exec '{sys.executable}' {' '.join(RUN)} '{script}'"
    env = variables(tmp_path) | {JOBS_VARIABLE: str(full)}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], env=env, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("through") + 1 >= 2  # the same line of two ranks may be shown as one
    assert "ddpilot: rank " in done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


LATE = """
import os, socket, time
from datetime import timedelta
import torch.distributed as dist

rank = int(os.environ["RANK"])
if rank == 0:
    time.sleep(6)
store = dist.TCPStore("127.0.0.1", int(os.environ["OWN_PORT"]), 2, rank == 0, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
dist.destroy_process_group()
"""


def test_a_rank_that_waits_for_a_store_to_come_is_not_interrupted(tmp_path: Path) -> None:
    """torch takes a signal there for an error, and begins anew: it is looked at without one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = run_here(LATE, tmp_path, OWN_PORT=str(port))
    assert done.code == 0
    assert "Interrupted" not in done.err + done.out
