# SPDX-License-Identifier: Apache-2.0
"""``ddpilot k8s``: print the manifest of a script's job for Kubernetes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args

from ddpilot.cli.job_parser import FieldOptions, JobParser, parse_pair
from ddpilot.errors import KubernetesError
from ddpilot.kubernetes.manifest import render_manifest
from ddpilot.kubernetes.options import Kind, KubernetesOptions, Launcher, pod_field
from ddpilot.option_parser import HelpRequested, parse_int

_DID = "reading the options of `ddpilot k8s`"

_USAGE = "ddpilot k8s SCRIPT --image IMAGE [OPTIONS] -- [ARGUMENTS OF THE SCRIPT]..."

_DESCRIPTION = """\
Print the manifest of a job that runs a script on Kubernetes: a PyTorchJob or a JobSet. It does not submit the job.

  ddpilot k8s train.py --image registry/train:1 --nodes 2 --gpus-per-node 4 -- --epochs 90 > job.yaml
  kubectl create -f job.yaml

SCRIPT is a path in the image. Further fields of the pods' spec are passed through: write --name=VALUE, with a text or a
value of JSON, such as --service-account-name=train or --tolerations='[{"operator": "Exists"}]'."""

_OPTIONS: FieldOptions = (
    ("--image/--container-image", "IMAGE", str, "container image of all pods, which has the script and torch"),
    ("--kind", "KIND", str, f"{' or '.join(get_args(Kind))} (pytorchjob)"),
    ("-N/--nodes", "N", parse_int, "number of nodes (1)"),
    ("-n/--nproc-per-node", "N", parse_int, "ranks on each node (one per GPU, else 1)"),
    ("--launcher", "NAME", str, f"what starts the ranks of a node: {' or '.join(get_args(Launcher))} (torchrun)"),
    ("--gpus-per-node/--gpus", "N", str, "GPUs on each node: a number of nvidia.com/gpu, or RESOURCE:NUMBER"),
    ("-c/--cpus-per-task/--cpu", "N", parse_int, "cores of each task: of a node's agent and all its ranks"),
    ("--mem/--memory", "SIZE", str, "memory of each node, such as 64Gi"),
    ("--shared-memory/--shm-size", "SIZE", str, "size of /dev/shm, such as 16Gi (as much as the pod may have)"),
    ("--namespace", "NAME", str, "namespace of the job"),
    ("-J/--job-name/--name", "NAME", str, "name of the job (the script's)"),
    ("-D/--chdir", "DIR", str, "folder to run in (that of the image)"),
    ("--max-restarts", "N", parse_int, "how often the job is started again after a failure (0)"),
    ("--python", "PATH", str, "the interpreter in the image (python)"),
)
"""Options that are one field of `KubernetesOptions` each."""


def make_parser() -> JobParser:
    """Return the parser. Names in its result are fields of `KubernetesOptions`, and `target` and `module`."""
    parser = JobParser("k8s", KubernetesError, "fields of a pod", usage=_USAGE, description=_DESCRIPTION)
    parser.add_argument("target", metavar="SCRIPT", help="a Python script in the image; with --module, a module")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, run as with `python -m`")
    parser.add_fields(_OPTIONS)
    parser.add_argument(
        "--env", metavar="NAME=VALUE", action="append", type=parse_pair, help="a variable to set; repeatable"
    )
    parser.add_argument(
        "--volume",
        dest="volumes",
        metavar="CLAIM:PATH",
        action="append",
        help="a persistent volume claim to mount, CLAIM:PATH:ro to read only; repeatable",
    )
    return parser


def read_words(words: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values in `words` by name, `extra` with fields of the pods' spec, and the script's arguments."""
    values, extra, args = make_parser().read_job(words)
    if extra:
        values["extra"] = {pod_field(name): _value(value) for name, value in extra.items()}
    if "env" in values:
        values["env"] = dict(values["env"])
    if "volumes" in values:
        values["volumes"] = tuple(values["volumes"])
    return values, args


def _value(text: str | bool) -> Any:
    if isinstance(text, bool):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def run_words(words: Sequence[str]) -> int:
    """Execute ``ddpilot k8s`` with these words; returns the exit status. Raises KubernetesError if they are invalid."""
    if not words:
        print(make_parser().format_help(), end="")
        return 2
    try:
        values, args = read_words(words)
    except HelpRequested as helped:
        print(helped, end="")
        return 0
    target, module = values.pop("target"), values.pop("module", False)
    if "image" not in values:
        fix = "Add --image NAME: a container image that has the script and torch"
        raise KubernetesError(_DID, found="no `image` is given", fix=fix, field="image")
    print(render_manifest(KubernetesOptions(**values), target, args, module=module), end="")
    return 0
