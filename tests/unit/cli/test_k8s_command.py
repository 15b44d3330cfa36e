# SPDX-License-Identifier: Apache-2.0
"""`ddpilot k8s`: words become options, and the manifest is printed."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from ddpilot.cli.app import app
from ddpilot.cli.k8s_command import read_words, run_words
from ddpilot.errors import KubernetesError
from ddpilot.kubernetes.manifest import render_manifest
from ddpilot.kubernetes.options import KubernetesOptions


def test_every_option_sets_its_field() -> None:
    """Converted to the type of the field; words after -- are the script's."""
    line = (
        "train.py -m --image a:1 --kind jobset -N 2 -n 4 --launcher ddpilot --gpus-per-node 4 -c 8 --mem 64Gi "
        "--shared-memory 8Gi --namespace n -J job -D /w --max-restarts 3 --python python3 --env A=1 --env B=x=y "
        "--volume a:/a --volume b:/b:ro --service-account-name=train --hostNetwork --priority=3 "
        '--nodeSelector={"pool":"a"} -- --epochs 9'
    )
    values, args = read_words(line.split())
    assert (values.pop("target"), values.pop("module"), args) == ("train.py", True, ("--epochs", "9"))
    assert KubernetesOptions(**values) == KubernetesOptions(
        image="a:1",
        kind="jobset",
        nodes=2,
        nproc_per_node=4,
        launcher="ddpilot",
        gpus_per_node="4",
        cpus_per_task=8,
        mem="64Gi",
        shared_memory="8Gi",
        namespace="n",
        job_name="job",
        chdir="/w",
        max_restarts=3,
        python="python3",
        env={"A": "1", "B": "x=y"},
        volumes=("a:/a", "b:/b:ro"),
        extra={"serviceAccountName": "train", "hostNetwork": True, "priority": 3, "nodeSelector": {"pool": "a"}},
    )


def test_names_of_kubernetes_are_understood_too() -> None:
    """`--gpus`, `--cpu`, `--memory`, `--name`, `--shm-size`."""
    line = "t.py --image a --gpus 1 --cpu 2 --memory 3Gi --name job --shm-size 1Gi"
    values, _ = read_words(line.split())
    del values["target"]
    assert KubernetesOptions(**values) == KubernetesOptions(
        image="a", gpus_per_node="1", cpus_per_task=2, mem="3Gi", job_name="job", shared_memory="1Gi"
    )


@pytest.mark.parametrize(
    ("line", "field", "text"),
    [
        ("t.py", "image", "Add --image NAME"),
        ("t.py --image a --nodes two", "nodes", "'two' is not a whole number"),
        ("t.py --image a --kind pod", "kind", "pytorchjob, jobset"),
        ("t.py --image a --gpu-per-node=4", "gpu_per_node", "Did you mean --gpus-per-node?"),
        ("t.py --image a --replicas=4", "replicas", "The field is nodes"),
        ("t.py --image a --mem-per-cpu=4G", "mem_per_cpu", "The field is mem"),
        ("t.py --image a --service-acount-name=x", "serviceAcountName", "serviceAccountName"),
        ("t.py --image a --env A", "env", "is not NAME=VALUE"),
        ("t.py --image a --epochs 9", "epochs", "comes after `--`"),
        ("--image a", "", "SCRIPT"),
    ],
)
def test_wrong_words_are_refused_with_a_proposal(line: str, field: str, text: str) -> None:
    """The error has the name of the field."""
    with pytest.raises(KubernetesError) as caught:
        run_words(line.split())
    assert caught.value.field == field
    assert text in f"{caught.value.found} {caught.value.fix}"


def test_command_prints_the_manifest_and_nothing_else() -> None:
    """So that its output can be sent to a file; the script need not be on this machine."""
    done = CliRunner().invoke(app, ["k8s", "train.py", "--image", "a:1", "--nodes", "2", "--", "--epochs", "90"])
    assert done.exit_code == 0
    assert done.output == render_manifest(KubernetesOptions(image="a:1", nodes=2), "train.py", ["--epochs", "90"])


def test_command_shows_its_options() -> None:
    """Also without words, with the exit status of a wrong call."""
    helped, empty = CliRunner().invoke(app, ["k8s", "--help"]), CliRunner().invoke(app, ["k8s"])
    assert helped.output == empty.output
    assert "--shared-memory" in helped.output
    assert (helped.exit_code, empty.exit_code) == (0, 2)
