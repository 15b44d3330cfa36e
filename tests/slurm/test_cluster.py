# SPDX-License-Identifier: Apache-2.0
"""What the other tests here take for granted of the simulated Slurm."""

from __future__ import annotations

from pathlib import Path

from tests.dist.launching.scripts import wait_until
from tests.slurm.cluster import Cluster


def test_cluster_runs_a_job_of_several_nodes_with_gpus_and_names_that_resolve(cluster: Cluster, tmp_path: Path) -> None:
    """Tasks run on nodes of their own host names and addresses, which resolve on all of them, with GPUs counted."""
    job = tmp_path / "job.sh"
    job.write_text(
        "#!/bin/bash\nhostname\ngetent hosts n3\n"
        "srun --ntasks-per-node=1 bash -c 'echo \"$SLURM_PROCID $(hostname) $CUDA_VISIBLE_DEVICES\"' | sort\n"
    )
    options = ("--parsable", "--nodes=3", "--gpus-per-node=2", "--output=out", job)
    job_id = cluster.run("sbatch", *options, cwd=tmp_path).stdout.strip()
    assert cluster.wait_for(job_id, ("COMPLETED", "FAILED")) == "COMPLETED"
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines == ["n1", f"{cluster.addresses['n3']:<15} n3", "0 n1 0,1", "1 n2 0,1", "2 n3 0,1"]


def test_cluster_notices_that_a_node_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    """A job on a node without power ends as NODE_FAIL, and the node comes back."""
    words = (
        "sbatch",
        "--parsable",
        "--nodes=2",
        "--no-requeue",
        "--output=out",
        "--wrap",
        "srun sh -c 'hostname; sleep 99'",
    )
    job_id = cluster.run(*words, cwd=tmp_path).stdout.strip()
    wait_until(lambda: "n2" in (tmp_path / "out").read_text() if (tmp_path / "out").exists() else False)
    cluster.kill_node("n2")
    assert cluster.wait_for(job_id, ("NODE_FAIL", "FAILED")) == "NODE_FAIL"
