# SPDX-License-Identifier: Apache-2.0
"""What the watch knows about a job's ranks, asked of each node: ``python -m ddpilot.slurm.node_report JOBID`` there."""

from __future__ import annotations

import sys

from ddpilot.watch.job_folder import list_jobs
from ddpilot.watch.past_jobs import explain_job, pids_of


def report_node(number: str, *, verbose: bool = False) -> str:
    """Return the reports of this node's watched ranks of the Slurm job with that SLURM_JOB_ID; "" without any."""
    found = []
    for folder, about in list_jobs():
        if about.is_running and not about.is_elsewhere and _is_of_job(pids_of(folder, about), number):
            found.append(explain_job(folder, about).render(verbose=verbose).rstrip())
    return "\n".join(found)


def _is_of_job(pids: set[int], number: str) -> bool:
    """Whether one of these processes has the number of the Slurm job in its environment."""
    wanted = f"SLURM_JOB_ID={number}".encode()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    return True
        except OSError:  # it has ended, or is another user's
            continue
    return False


if __name__ == "__main__":
    print(report_node(sys.argv[1]))  # noqa: T201
