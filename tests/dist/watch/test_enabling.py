# SPDX-License-Identifier: Apache-2.0
"""`enable` where a rank is more than one Python: a shell that runs several, and a launcher inside a rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddpilot.watch.job_folder import list_jobs
from tests.dist.launching.scripts import run_script, wait_until
from tests.dist.watch.test_scripts import ENABLE, ENTER, TORCHRUN, observers, variables
from tests.ports import kept_port
from tests.soak import often

SHELL = """
import os, subprocess, sys
first = subprocess.run([sys.executable, "first.py"], stderr=subprocess.DEVNULL).returncode
# torchrun's own store still has the addresses of the first.
theirs = {"MASTER_PORT": os.environ["SECOND_PORT"], "TORCHELASTIC_USE_AGENT_STORE": "False"}
second = subprocess.run([sys.executable, "second.py"], env={**os.environ, **theirs}).returncode
print("codes", first, second, flush=True)
sys.exit(second)
"""
FIRST = f"{ENABLE}{ENTER}dist.destroy_process_group()\nif {{fails}}:\n    raise ValueError('of the first')\n"
HEALTHY = f"{ENABLE}{ENTER}time.sleep(2)\ndist.all_reduce(torch.ones(1))\ndist.destroy_process_group()\n"
WRONG = f"{ENABLE}{ENTER}dist.broadcast(torch.ones(1), 0) if rank else dist.all_reduce(torch.ones(2))\n"


@often("one fails at first, the second is wrong")
@pytest.mark.parametrize(
    ("fails", "second", "status"),
    [("True", HEALTHY, 0), ("rank == 0", HEALTHY, 0), ("rank == 0", WRONG, 1)],
    ids=["both fail at first", "one fails at first", "one fails at first, the second is wrong"],
)
def test_a_second_python_of_a_rank_is_observed_for_itself(tmp_path: Path, fails: str, second: str, status: int) -> None:
    """A shell around it may try again: what the first raised stops nothing, and what the second does wrong is found."""
    (tmp_path / "first.py").write_text(FIRST.format(fails=fails))
    (tmp_path / "second.py").write_text(second)
    with kept_port() as port:
        env = {**variables(tmp_path), "SECOND_PORT": str(port)}
        done = run_script(SHELL, tmp_path, module=TORCHRUN, env=env, may_fail=True)
    assert done.code == status, done.err
    assert ("DDP201" in done.err) == bool(status)
    assert "of the first" not in done.err
    if status == 0:
        assert "ddpilot" not in done.err
        assert done.out.count("codes") == 2
    wait_until(lambda: not observers(tmp_path), limit_s=10)
    assert len(list_jobs(tmp_path / "jobs")) == status


INNER = """
import os, subprocess, sys
if rank == 0:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "{port}"]
    inner = subprocess.run([*command, "inner.py"], capture_output=True, text=True)
    print("inner", inner.returncode, "DDP201" in inner.stderr, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_job_that_a_rank_has_launched_is_observed_for_itself(tmp_path: Path) -> None:
    """It inherits the variables of that rank, and is another job."""
    (tmp_path / "inner.py").write_text(WRONG)
    with kept_port() as port:
        done = run_script(
            ENABLE + ENTER + INNER.format(port=port), tmp_path, module=TORCHRUN, env=variables(tmp_path), may_fail=True
        )
    assert done.code == 0, done.err
    assert "inner 1 True" in done.out
    wait_until(lambda: not observers(tmp_path), limit_s=10)
    ((_, about),) = list_jobs(tmp_path / "jobs")
    assert about.name == "inner.py"


def test_the_observer_does_not_import_modules_of_the_working_directory(tmp_path: Path) -> None:
    """A file there may have the name of a module of Python's own, and be another user's."""
    from ddpilot.watch.external.instrumentation import _DETACH

    for name in ("platform", "runpy", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    job = tmp_path / "none"
    done = subprocess.run(
        [sys.executable, "-c", _DETACH, "ddpilot.watch.external.observer_process", str(job)],
        cwd=tmp_path,
        env=variables(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    assert "the observer failed" in done.stderr
    assert not (tmp_path / "imported").exists()
