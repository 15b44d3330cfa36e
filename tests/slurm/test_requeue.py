# SPDX-License-Identifier: Apache-2.0
"""Jobs that are requeued on a real Slurm: by a signal, by preemption, after a lost node, and not for the same error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dist.launching.scripts import wait_until
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import DDPILOT, PYTHON, TRAIN, TRAINER, following, losses
from tests.soak import SOAK, soak


def submit(cluster: Cluster, folder: Path, *options: str, fail_after: int = -1, pause_s: float = 0.0) -> str:
    """Submit the training as a job of two nodes; its number."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAIN)
    words = (*DDPILOT, "train.py", "--nodes=2", "--requeue", *PYTHON, "--no-follow", "--output=out", *options)
    done = cluster.run(*words, "--", fail_after, pause_s, cwd=folder, OMP_NUM_THREADS="1")
    found = re.search(r"submitted job (\d+)", done.stderr)
    assert found is not None, done.stderr
    return found[1]


def num_losses(folder: Path) -> int:
    """Updates whose loss was written so far."""
    path = folder / "losses"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture(scope="module")
def straight(cluster_of_module: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a job that nothing happens to."""
    folder = tmp_path_factory.mktemp("straight")
    job_id = submit(cluster_of_module, folder)
    assert cluster_of_module.wait_for(job_id, ("COMPLETED", "FAILED")) == "COMPLETED", (folder / "out").read_text()
    found = losses(folder)
    assert sorted(found) == list(range(1, 61))
    return found


@pytest.mark.parametrize("launcher", ["python", pytest.param("ddpilot", marks=SOAK)])
def test_job_saves_at_the_signal_and_goes_on_exactly(
    cluster: Cluster, tmp_path: Path, straight: dict[int, str], launcher: str
) -> None:
    """USR1 ends it with 75 after a checkpoint, the script requeues it, and all losses are those of a straight run."""
    job_id = submit(cluster, tmp_path, f"--launcher={launcher}", pause_s=0.05)
    wait_until(lambda: num_losses(tmp_path) >= 10)
    cluster.run("scancel", "--signal=USR1", job_id)
    cluster.wait_for(job_id, ("PENDING",))
    assert cluster.wait_for(job_id, ("COMPLETED", "FAILED")) == "COMPLETED", (tmp_path / "out").read_text()
    text = (tmp_path / "out").read_text()
    assert "exit code 75: job" in text
    assert losses(tmp_path) == straight


@pytest.mark.timeout(200)  # Slurm looks at time limits twice a minute
@soak
def test_job_goes_on_past_its_time_limit_and_is_followed_through_it(
    cluster: Cluster, tmp_path: Path, straight: dict[int, str]
) -> None:
    """Slurm itself sends the signal before the limit; `ddpilot slurm` stays with the job until it has completed."""
    words = ("--nodes=2", "--requeue", "--time=10", "--signal=USR1@60", "--", "-1", "0.7")
    with following(cluster, tmp_path, TRAIN, *words) as followed:
        wait_until(lambda: num_losses(tmp_path) >= 5)
        cluster.run("scontrol", "update", f"JobId={followed.job_id}", "EndTime=now+62")
        assert followed.wait(limit_s=115) == 0
    assert "exit code 75: job" in followed.out
    assert re.search(r" is running on .* is pending: .* is running on ", followed.err, re.DOTALL)
    assert re.search(r"completed after \S+, requeued \dx before", followed.err)  # on a slow machine also twice
    assert losses(tmp_path) == straight


@soak
def test_task_of_an_array_is_requeued_alone(cluster: Cluster, tmp_path: Path) -> None:
    """Also the one whose number is that of the whole array; each resumes from a checkpoint folder of its own."""
    task = 'os.environ["SLURM_ARRAY_TASK_ID"]'
    program = TRAIN.replace('"ckpt"', f'"ckpt" + {task}').replace('"losses"', f'"losses" + {task}')
    paths = [tmp_path / f"losses{i}" for i in range(3)]
    words = ("--array=0-2", "--nodes=1", "--requeue", "--time=10", "--", "-1", "0.2")
    with following(cluster, tmp_path, program, *words) as followed:
        wait_until(lambda: all(path.exists() for path in paths), limit_s=60)
        number = followed.job_id
        ids = cluster.run("squeue", "--noheader", "--array", "--format=%A %K", f"--jobs={number}").stdout.split()
        last = dict(zip(ids[::2], ids[1::2], strict=True))[number]
        cluster.run("scancel", "--signal=USR1", f"{number}_{last}")
        assert followed.wait(limit_s=100) == 0, followed.err
    assert all(
        [line.split()[0] for line in path.read_text().splitlines()] == [*map(str, range(1, 61))] for path in paths
    )
    assert followed.err.count("was requeued") == 1
    assert f"job {number}_{last} was requeued after" in followed.err
    assert f"{last}: job {number}_{last} starts again on" in followed.out
    assert followed.err.endswith(f"array {number}: 3 of 3 tasks completed\n")


def test_job_that_fails_twice_at_the_same_update_is_not_requeued_again(cluster: Cluster, tmp_path: Path) -> None:
    """An error of a rank is tried once more; the same one at the same update ends the job, and the reason is said."""
    job_id = submit(cluster, tmp_path, fail_after=7)
    wait_until(lambda: "is requeued" in (tmp_path / "out").read_text() if (tmp_path / "out").exists() else False)
    assert cluster.wait_for(job_id, ("COMPLETED", "FAILED")) == "FAILED"
    text = (tmp_path / "out").read_text()
    assert text.count("is requeued") == 1
    assert (
        "not requeued: the same error came at the same update twice: after 7 updates: ValueError: bad sample 17" in text
    )
    done = cluster.run(*DDPILOT, "status", job_id, cwd=tmp_path)
    assert "first failure: after 7 updates: ValueError: bad sample 17" in done.stdout
    assert "requeued 1x before" in done.stdout


@soak
def test_preempted_job_saves_and_goes_on_exactly(cluster: Cluster, tmp_path: Path, straight: dict[int, str]) -> None:
    """SIGTERM from a job with priority: the ranks save within the grace time, and go on when the nodes are free."""
    job_id = submit(cluster, tmp_path, "--nodes=2", "--exclusive", "--partition=low", "--nodelist=n[1-2]", pause_s=0.05)
    wait_until(lambda: num_losses(tmp_path) >= 10)
    urgent = ("--partition=urgent", "--exclusive", "--nodelist=n[1-2]", "--nodes=2", "--output=/dev/null")
    cluster.run("sbatch", *urgent, "--wrap", "true")
    cluster.wait_for(job_id, ("PENDING",))
    assert cluster.wait_for(job_id, ("COMPLETED", "FAILED")) == "COMPLETED", (tmp_path / "out").read_text()
    assert losses(tmp_path) == straight


@soak
def test_job_goes_on_after_a_lost_node_from_its_last_checkpoint(
    cluster: Cluster, tmp_path: Path, straight: dict[int, str]
) -> None:
    """Slurm requeues it on other nodes; it resumes at the end of the last epoch, with the same losses from there."""
    job_id = submit(cluster, tmp_path, "--nodelist=n[1-2]", pause_s=0.05)
    wait_until(lambda: num_losses(tmp_path) >= 25)
    cluster.kill_node("n2")
    cluster.wait_for(job_id, ("PENDING",))
    cluster.mend("n2")
    cluster.start_node("n2")
    assert cluster.wait_for(job_id, ("COMPLETED", "FAILED"), limit_s=100) == "COMPLETED", (tmp_path / "out").read_text()
    rows = [line.split() for line in (tmp_path / "losses").read_text().splitlines()]
    again = next(i for i in range(1, len(rows)) if int(rows[i][0]) <= int(rows[i - 1][0]))
    assert int(rows[again][0]) == 21
    assert all(straight[int(number)] == value for number, value, _ in rows)


@pytest.mark.parametrize(
    ("options", "num_ranks"),
    [(("--nodes=1", "--nproc-per-node=2"), "2"), pytest.param(("--nodes=3",), "3", marks=SOAK)],
)
def test_saved_job_goes_on_in_a_job_of_another_number_of_nodes(
    cluster: Cluster, tmp_path: Path, straight: dict[int, str], options: tuple[str, ...], num_ranks: str
) -> None:
    """Two nodes until the signal; a new job makes the updates that are left, each once: exactly with as many ranks."""
    job_id = submit(cluster, tmp_path, pause_s=0.05)
    wait_until(lambda: num_losses(tmp_path) >= 10)
    cluster.run("scancel", "--signal=USR1", job_id)
    cluster.wait_for(job_id, ("PENDING",))
    cluster.run("scancel", job_id)
    job_id = submit(cluster, tmp_path, *options)
    assert cluster.wait_for(job_id, ("COMPLETED", "FAILED")) == "COMPLETED", (tmp_path / "out").read_text()
    rows = [line.split() for line in (tmp_path / "losses").read_text().splitlines()]
    assert [int(row[0]) for row in rows] == list(range(1, 61))
    assert (rows[9][2], rows[-1][2]) == ("2", num_ranks)
    assert num_ranks != "2" or losses(tmp_path) == straight


@soak
def test_trainer_is_requeued_as_a_loop_is(cluster: Cluster, tmp_path: Path) -> None:
    """With USR1 in the middle of an epoch: the history of all updates is that of a fit that nothing happened to."""
    histories = []
    for name, pause_s in (("straight", "0"), ("requeued", "0.05")):
        folder = tmp_path / name
        folder.mkdir()
        with following(cluster, folder, TRAINER, "--nodes=2", "--requeue", "--", pause_s) as followed:
            if name == "requeued":
                updates = folder / "updates"
                wait_until(lambda: updates.exists() and updates.stat().st_size >= 30)  # noqa: B023  # called right here
                cluster.run("scancel", "--signal=USR1", followed.job_id)
            assert followed.wait(limit_s=100) == 0, followed.out
        histories.append(next(line for line in followed.out.splitlines() if "history" in line))
        assert (folder / "updates").stat().st_size == 60
    assert "requeued 1x before" in followed.err
    assert histories[0].partition(": ")[2] == histories[1].partition(": ")[2]
