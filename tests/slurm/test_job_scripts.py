# SPDX-License-Identifier: Apache-2.0
"""Job scripts of all shapes on a real Slurm: accepted by sbatch, and the same losses of one training by all of them.

A session on the nodes has those losses too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import DDPILOT, PYTHON, TRAIN, losses
from tests.soak import often, soak
from tests.unit.slurm.scripts import GOLDEN, OPTIONS

SHAPES = {
    "one_node": ("--nproc-per-node=4", "--launcher=torchrun"),
    "nodes_with_one_rank": ("--nodes=4",),
    "nodes_with_ranks": ("--nodes=2", "--nproc-per-node=2"),
    "nodes_by_ddpilot": ("--nodes=2", "--nproc-per-node=2", "--launcher=ddpilot"),
    "tasks": ("--nodes=2", "--nproc-per-node=2", "--launcher=python", "--gpus-per-node=2", "--cpus-per-task=2"),
}

WITHOUT_DROPOUT = TRAIN.replace("Dropout(0.2)", "Tanh()")  # whose draws differ between numbers of ranks


@pytest.mark.parametrize("name", OPTIONS)
def test_sbatch_accepts_the_job_script(cluster: Cluster, name: str) -> None:
    """`sbatch --test-only` takes it for a job that can start on this cluster."""
    done = cluster.run("sbatch", "--test-only", GOLDEN / f"{name}.sh")
    assert "to start at" in done.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the script under plain Python."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(WITHOUT_DROPOUT)
    subprocess.run([sys.executable, "train.py", "-1", "0"], cwd=folder, check=True, timeout=100, capture_output=True)
    return {number: float.fromhex(value) for number, value in losses(folder).items()}


@often("nodes_with_ranks")
@pytest.mark.parametrize("shape", SHAPES)
def test_shape_trains_as_plain_python_does(
    cluster: Cluster, tmp_path: Path, shape: str, alone: dict[int, float]
) -> None:
    """The same script, unchanged, on four ranks: 60 losses that differ by less than 1e-10."""
    (tmp_path / "train.py").write_text(WITHOUT_DROPOUT)
    done = cluster.run(
        *(*DDPILOT, "train.py", *SHAPES[shape], *PYTHON, "--", "-1", "0"),
        cwd=tmp_path,
        timeout_s=100,
        check=False,
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained 60" in done.stdout
    assert "completed" in done.stderr
    found = {number: float.fromhex(value) for number, value in losses(tmp_path).items()}
    assert found == pytest.approx(alone, abs=1e-10)


@soak
@pytest.mark.parametrize(("num_nodes", "per_node"), [(2, 2), (4, 1)])
def test_session_trains_as_plain_python_does(
    cluster: Cluster, tmp_path: Path, num_nodes: int, per_node: int, alone: dict[int, float]
) -> None:
    """The same script by `%run` in a cell of a notebook whose ranks are on the nodes."""
    (tmp_path / "train.py").write_text(WITHOUT_DROPOUT)
    (tmp_path / "notebook.ipy").write_text(
        f"%load_ext ddpilot\n%ddp start --slurm --nodes {num_nodes} -n {per_node}\n"
        "get_ipython().run_cell_magic('ddp', '', '%run train.py -1 0')\n%ddp stop\n"
    )
    words = (sys.executable, "-m", "IPython", "notebook.ipy")
    done = cluster.run(*words, cwd=tmp_path, timeout_s=100, check=False, OMP_NUM_THREADS="1")
    assert "[rank 0] trained 60" in done.stdout, done.stdout + done.stderr
    found = {number: float.fromhex(value) for number, value in losses(tmp_path).items()}
    assert found == pytest.approx(alone, abs=1e-10)
