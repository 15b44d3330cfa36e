# SPDX-License-Identifier: Apache-2.0
"""Manifests that are kept as text in golden/. `python -m tests.unit.kubernetes.manifests` writes them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddpilot.kubernetes.manifest import render_manifest
from ddpilot.kubernetes.options import KubernetesOptions

GOLDEN = Path(__file__).parent / "golden"

IMAGE = "registry.example.org/train:1.2"

EVERYTHING: dict[str, Any] = {
    "nodes": 3,
    "gpus_per_node": 8,
    "cpus_per_task": 96,
    "mem": "512Gi",
    "shared_memory": "64Gi",
    "namespace": "research",
    "job_name": "sweep-7",
    "chdir": "/workspace",
    "env": {"NCCL_DEBUG": "INFO", "GREETING": "it's $(HOME): yes", "ON": "yes"},
    "volumes": ("data:/data:ro", "results:/results", "data:/more/data"),
    "max_restarts": 2,
    "extra": {
        "serviceAccountName": "train",
        "terminationGracePeriodSeconds": 120,
        "nodeSelector": {"pool": "a100", "spot": "false"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    },
}

OPTIONS: dict[str, dict[str, Any]] = {
    "pytorchjob": {"nodes": 2, "gpus_per_node": 4},
    "pytorchjob_one_node": {"gpus_per_node": "amd.com/gpu:4", "cpus_per_task": 12},
    "pytorchjob_by_ddpilot": {"nodes": 2, "nproc_per_node": 2, "launcher": "ddpilot", "python": "/opt/py/bin/python3"},
    "pytorchjob_with_everything": EVERYTHING,
    "jobset": {"kind": "jobset", "nodes": 2, "gpus_per_node": 4},
    "jobset_one_node": {"kind": "jobset", "nproc_per_node": 2, "launcher": "ddpilot"},
    "jobset_with_everything": {**EVERYTHING, "kind": "jobset", "python": "python3"},
}
"""Options by the name of the file."""

WORDS = ("train.py", ("--epochs", "90", "--name", "it's", "--glob", "*.pt", "--price", "$(COST) $5"))


def render(name: str) -> str:
    """Return the manifest of that name."""
    return render_manifest(KubernetesOptions(image=IMAGE, **OPTIONS[name]), *WORDS)


if __name__ == "__main__":
    for each in OPTIONS:
        (GOLDEN / f"{each}.yaml").write_text(render(each))
