# SPDX-License-Identifier: Apache-2.0
"""Options of a manifest: which values are refused, by which name, with which proposal."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from ddpilot.errors import KubernetesError
from ddpilot.kubernetes.options import KubernetesOptions, Mount, pod_field
from ddpilot.slurm.options import JobOptions

IMAGE = "train:1"


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("image", "", "text of one line"),
        ("image", "a b", "pytorch/pytorch:latest"),
        ("image", None, "pytorch/pytorch:latest"),
        ("kind", "job", "pytorchjob, jobset"),
        ("launcher", "python", "torchrun, ddpilot"),
        ("nodes", 0, "at least 1"),
        ("nodes", "2", "at least 1"),
        ("nproc_per_node", True, "at least 1"),
        ("cpus_per_task", 0, "at least 1"),
        ("max_restarts", -1, "at least 0"),
        ("gpus_per_node", 0, "amd.com/gpu:4"),
        ("gpus_per_node", "a100:4", "amd.com/gpu:4"),
        ("gpus_per_node", 1.5, "amd.com/gpu:4"),
        ("mem", "64", "64Gi"),
        ("mem", "64GB", "64Gi"),
        ("mem", "0Gi", "64Gi"),
        ("mem", 64, "64Gi"),
        ("shared_memory", "all", "16Gi"),
        ("namespace", "My_space", "lower-case"),
        ("job_name", "Train", "lower-case"),
        ("job_name", "7b", "begins with a letter"),
        ("job_name", "a" * 60, "at most 54 characters"),
        ("chdir", "results", "absolute"),
        ("python", "a\nb", "one line"),
        ("volumes", ("data",), "data:/data"),
        ("volumes", ("data:data",), "data:/data"),
        ("volumes", ("data:/",), "data:/data"),
        ("volumes", ("data:/data:rw",), "data:/data"),
        ("volumes", ("a:/data", "b:/data/"), "different path"),
        ("volumes", ("a:/dev/shm",), "different path"),
        ("volumes", "a:/data", "('a:/data',)"),
        ("env", {"A B": "1"}, "names of variables"),
        ("env", {"A": "1\n2"}, "one line"),
        ("env", {"RANK": "0"}, "leave it out"),
        ("env", {"PET_NNODES": "2"}, "leave it out"),
        ("extra", {"gpus": "4"}, "gpus_per_node"),
        ("extra", {"memory": "4"}, "mem"),
        ("extra", {"restartPolicy": "Always"}, "max_restarts"),
        ("extra", {"gpu_per_node": "4"}, "`gpus_per_node`"),
        ("extra", {"serviceAcountName": "a"}, "`serviceAccountName`"),
        ("extra", {"a b": "a"}, "a field of a pod's spec"),
        ("extra", {"affinity": {1, 2}}, "JSON"),
        ("extra", {"priority": float("nan")}, "JSON"),
    ],
)
def test_options_refuse_a_wrong_value_by_name_with_a_proposal(name: str, value: Any, fix: str) -> None:
    """The error has the field's name, also as an attribute; of `extra`, the name of its key."""
    with pytest.raises(KubernetesError) as caught:
        KubernetesOptions(**{"image": IMAGE, name: value})
    wanted = next(iter(value)) if name == "extra" else name
    assert caught.value.field == wanted
    assert f"`{wanted}`" in str(caught.value)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image", "localhost:5000/a/B@sha256:0123"),
        ("gpus_per_node", 8),
        ("gpus_per_node", "8"),
        ("gpus_per_node", "nvidia.com/mig-1g.10gb:2"),
        ("mem", "1.5Ti"),
        ("mem", "500M"),
        ("namespace", "2-a"),
        ("job_name", "a" * 54),
        ("volumes", ("a.b-c:/data/x:ro", "a.b-c:/y/")),
        ("extra", {"hostNetwork": True, "runtimeClassName": "nvidia"}),
        ("extra", {"newFieldOfKubernetes": [1]}),
    ],
)
def test_options_take_what_kubernetes_takes(name: str, value: Any) -> None:
    """Unknown fields of a pod are passed through."""
    assert getattr(KubernetesOptions(**{"image": IMAGE, name: value}), name) == value


def test_options_refuse_more_shared_memory_than_memory() -> None:
    """It counts as memory: the pod would be killed before it is full."""
    assert KubernetesOptions(image=IMAGE, mem="1Gi", shared_memory="1024Mi").shared_memory == "1024Mi"
    with pytest.raises(KubernetesError, match=r"`shared_memory` is '2G', with `mem` '1Gi'.*at most `mem`"):
        KubernetesOptions(image=IMAGE, mem="1Gi", shared_memory="2G")


@pytest.mark.parametrize(("kind", "longest"), [("pytorchjob", 52), ("jobset", 46)])
def test_name_leaves_room_for_the_names_of_its_pods(kind: Any, longest: int) -> None:
    """NAME-worker-998, and NAME-node-0-999-12345, have 63 characters at most."""
    assert KubernetesOptions(image=IMAGE, kind=kind, nodes=1000).longest_name == longest
    assert len(f"{'a' * longest}{'-worker-998' if kind == 'pytorchjob' else '-node-0-999-12345'}") == 63


def test_ranks_are_one_per_gpu_unless_given() -> None:
    """As for a Slurm job."""
    assert KubernetesOptions(image=IMAGE).num_ranks_per_node == 1
    assert KubernetesOptions(image=IMAGE, gpus_per_node="amd.com/gpu:4").num_ranks_per_node == 4
    assert KubernetesOptions(image=IMAGE, gpus_per_node=4, nproc_per_node=2).num_ranks_per_node == 2


def test_gpus_are_nvidias_unless_named() -> None:
    """The name before the colon is the resource's."""
    assert KubernetesOptions(image=IMAGE, gpus_per_node=4).gpu_resource == "nvidia.com/gpu"
    assert KubernetesOptions(image=IMAGE, gpus_per_node="amd.com/gpu:4").gpu_resource == "amd.com/gpu"


def test_volumes_are_taken_apart() -> None:
    """Claim, path without a slash at its end, and :ro."""
    options = KubernetesOptions(image=IMAGE, volumes=("data:/data/:ro", "out:/out"))
    assert options.mounts == (
        Mount(claim="data", path="/data", read_only=True),
        Mount(claim="out", path="/out", read_only=False),
    )


def test_names_shared_with_slurm_are_the_same() -> None:
    """A field of `JobOptions` that has the same meaning here has the same name; the rest is of Kubernetes alone."""
    shared = {each.name for each in fields(KubernetesOptions)} & {each.name for each in fields(JobOptions)}
    assert shared == {
        *("nodes", "nproc_per_node", "launcher", "python", "gpus_per_node", "cpus_per_task", "mem"),
        *("job_name", "chdir", "env", "extra"),
    }


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("service-account-name", "serviceAccountName"),
        ("priorityClassName", "priorityClassName"),
        ("tolerations", "tolerations"),
        ("mem-per-cpu", "mem_per_cpu"),
    ],
)
def test_field_of_a_pod_may_be_written_with_dashes(name: str, field: str) -> None:
    """As other options of a command; names that have a substitute keep theirs."""
    assert pod_field(name) == field
