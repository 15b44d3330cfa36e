# SPDX-License-Identifier: Apache-2.0
"""Job scripts that are kept as text in golden/. `python -m tests.unit.slurm.scripts` writes them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddpilot.slurm.options import JobOptions
from ddpilot.slurm.script import render_job_script

GOLDEN = Path(__file__).parent / "golden"

OPTIONS: dict[str, dict[str, Any]] = {
    "one_node": {"gpus_per_node": "4", "cpus_per_task": 12, "time": "2:00:00", "account": "proj"},
    "nodes_with_one_gpu": {"nodes": 4, "gpus_per_node": "1", "mem_per_cpu": "4G", "cpus_per_task": 1},
    "nodes_with_gpus": {"nodes": 2, "gpus_per_node": "4", "partition": "all", "exclusive": True},
    "nodes_by_ddpilot": {"nodes": 2, "nproc_per_node": 2, "launcher": "ddpilot", "python": "/opt/py/bin/python3"},
    "one_node_by_ddpilot": {"nproc_per_node": 2, "launcher": "ddpilot"},
    "one_rank": {"launcher": "python", "gres": "gpu:1"},
    "tasks_with_gpus": {"nodes": 2, "nproc_per_node": 2, "gpus_per_task": "1", "launcher": "python"},
    "requeue": {"nodes": 2, "gpus_per_node": "2", "requeue": True, "time": "60"},
    "requeue_by_ddpilot": {
        "nodes": 2,
        "nproc_per_node": 2,
        "requeue": True,
        "launcher": "ddpilot",
        "signal": "TERM@60",
    },
    "modules_and_venv": {"modules": ("python/3.11", "cuda/12.4"), "venv": "/shared/my env", "mem": "8G"},
    "conda": {"conda": "train", "env": {"NCCL_DEBUG": "INFO", "NAME": "a b"}, "setup": ("ulimit -n 65536",)},
    "uv": {"uv": True, "nproc_per_node": 2},
    "apptainer": {"container": "/shared/torch image.sif", "gpus_per_node": "2", "nodes": 2},
    "pyxis": {"container_image": "nvcr.io#nvidia/pytorch:25.01-py3", "gpus_per_node": "2"},
    "array_and_mail": {
        "nodes": 2,
        "array": "0-3%2",
        "dependency": "afterany:1",
        "mail_type": "END,FAIL",
        "mail_user": "me@example.org",
        "constraint": "fake",
        "chdir": "/tmp",
        "output": "logs/%A_%a.out",
        "error": "logs/%A_%a.err",
        "begin": "now+1hour",
        "job_name": "sweep",
        "nodelist": "n[1-2]",
        "exclude": "n3",
        "signal": "B:USR1@30",
        "extra": {"comment": 'a "b" c', "spread_job": True, "nice": "10", "oversubscribe": False},
    },
}
"""Options by the name of the file. A Slurm of four nodes with four GPUs each accepts all of them."""

WORDS = ("train.py", ("--epochs", "90", "--name", "it's", "--glob", "*.pt"))


def render(name: str) -> str:
    """Return the job script of that name."""
    return render_job_script(JobOptions(**OPTIONS[name]), *WORDS)


if __name__ == "__main__":
    for each in OPTIONS:
        (GOLDEN / f"{each}.sh").write_text(render(each))
