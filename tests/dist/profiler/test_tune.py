# SPDX-License-Identifier: Apache-2.0
"""`ddpilot tune` on real ranks: what is overridden, what does not work, what helps, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpilot.cli.tune_command import Runner
from ddpilot.profiler.rank.overrides import Call, Trial
from tests.dist.forked import forked_ranks, start_forked
from tests.dist.in_process import Run, run_command

__all__ = ["run_command"]

SCRIPT = Path(__file__).with_name("tunable.py")
NUM_UPDATES = 12


def command(*words: object) -> list[str]:
    """The command with these words."""
    return [sys.executable, "-m", "ddpilot", "tune", *map(str, words)]


@pytest.fixture(autouse=True)
def ranks_are_forked() -> Iterator[None]:
    """Those of runs with one thread."""
    with forked_ranks():
        yield


def run_calls(trial: Trial) -> list[Call]:
    """The calls of a run of the script, which ended after its updates."""
    profile, _, calls = Runner(str(SCRIPT), ("used",), 2).profile(trial)
    assert profile.phases.first_update + profile.phases.seconds.shape[1] - 1 == NUM_UPDATES
    return calls


def find_error(trial: Trial) -> str:
    """The error of a run of the script with a parameter that is unused."""
    return Runner(str(SCRIPT), ("unused",), 2).run(trial).error


def test_a_trial_overrides_what_the_script_passes() -> None:
    """DDP, the loader that is trained on and threads; each call is noted with its line, as it is and as changed."""
    calls = run_calls(Trial(num_updates=NUM_UPDATES))
    threads, ddp, evaluated, trained = calls
    assert [each.kind for each in calls] == ["threads", "ddp", "loader", "loader"]
    assert (ddp.values["bucket_cap_mb"], ddp.line.text) == (1.0, "ddp = DistributedDataParallel(")
    assert (evaluated.num_passes, trained.num_passes) == (0, 1)
    trial = Trial(
        num_updates=NUM_UPDATES,
        ddp={"bucket_cap_mb": 10, "static_graph": True},
        loader={"num_workers": 1},
        loader_lines=(trained.line.position,),
        num_threads=2,
        environ={"OMP_NUM_THREADS": "2"},
    )
    threads, ddp, evaluated, trained = run_calls(trial)
    assert (ddp.values["bucket_cap_mb"], ddp.values["static_graph"]) == (10.0, True)
    assert (evaluated.values["num_workers"], trained.values["num_workers"]) == (0, 1)
    assert threads.values == {"num_threads": 1}


def test_an_option_that_does_not_work_has_its_error() -> None:
    """A parameter is unused, which guard may name before torch raises; the script has a hook of its own."""
    error = find_error(Trial(num_updates=NUM_UPDATES, ddp={"find_unused_parameters": False}))
    assert "Expected to have finished reduction" in error or "unused.weight" in error
    error = find_error(Trial(num_updates=NUM_UPDATES, compression="fp16"))
    assert "register_comm_hook" in error


@pytest.mark.soak
@pytest.mark.skipif(os.environ.get("DDPILOT_SOAK") != "1", reason="24 runs of the script: run by `make soak`")
@pytest.mark.timeout(400)
def test_what_helps_is_found_and_its_line_is_printed() -> None:
    """One bucket in place of four, on a link that takes 20 ms for each."""
    words = (SCRIPT, "-n", 2, "--updates", 20, "--rounds", 6, "--json", "--", "used")
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["helps"] == ["bucket_cap_mb=10"], done.stderr
    assert found["gain"]["low"] > 1
    assert found["tried"][0]["estimate"] > 1.3
    (change,) = found["changes"]
    assert SCRIPT.samefile(change["where"].rpartition(":")[0])
    assert (change["old"], change["new"]) == (["bucket_cap_mb=1,"], ["bucket_cap_mb=10,"])


def test_an_interrupt_ends_with_what_is_known() -> None:
    """After the first run as it is; no rank remains, which the fixtures of all tests look at."""
    words = (SCRIPT, "-n", 2, "--updates", NUM_UPDATES, "--", "used")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with start_forked(command(*words), environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("run 1"):
                process.send_signal(signal.SIGINT)
                break
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Nothing has helped so far. The trials ended early: interrupted." in printed
    assert "bucket_cap_mb=10  " in printed


def test_what_cannot_be_tuned_is_refused(tmp_path: Path, run_command: Run) -> None:
    """Too few updates of a run; a script that fails as it is."""
    done = run_command("tune", SCRIPT, "--updates", 5)
    assert (done.returncode, "reading --updates" in done.stderr) == (2, True)
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\nraise ValueError('broken')\n")
    done = run_command("tune", broken, "-n", 2)
    assert 'broken.py", line 2' in done.stderr
    assert "ValueError: broken" in done.stderr
    assert "rank_main" not in done.stderr
    assert done.returncode != 0
