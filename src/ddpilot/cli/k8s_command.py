# SPDX-License-Identifier: Apache-2.0
"""``ddpilot k8s``: print the manifest of a script's job for Kubernetes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any, get_args

from ddpilot.errors import KubernetesError, did_you_mean
from ddpilot.kubernetes.manifest import render_manifest
from ddpilot.kubernetes.options import Kind, KubernetesOptions, Launcher, pod_field
from ddpilot.option_parser import HelpRequested, OptionParser, parse_int

_DID = "reading the options of `ddpilot k8s`"

_USAGE = "ddpilot k8s SCRIPT --image IMAGE [OPTIONS] -- [ARGUMENTS OF THE SCRIPT]..."

_DESCRIPTION = """\
Print the manifest of a job that runs a script on Kubernetes: a PyTorchJob or a JobSet. It does not submit the job.

  ddpilot k8s train.py --image registry/train:1 --nodes 2 --gpus-per-node 4 -- --epochs 90 > job.yaml
  kubectl create -f job.yaml

SCRIPT is a path in the image. Further fields of the pods' spec are passed through: write --name=VALUE, with a text or a
value of JSON, such as --service-account-name=train or --tolerations='[{"operator": "Exists"}]'."""

_OPTIONS: tuple[tuple[str, str, Callable[[str], Any], str], ...] = (
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
"""Flags, placeholder, type and help of the options that are one field of `KubernetesOptions`."""


class K8sParser(OptionParser):
    """The parser of the options of `ddpilot k8s`."""

    def refuse(self, argument: str | None, message: str) -> KubernetesError:
        """Return the error for a wrong value."""
        flag = next((each for each in (argument or "").split("/") if each.startswith("--")), "")
        field = flag.lstrip("-").replace("-", "_")
        fix = "`ddpilot k8s --help` has more"
        return KubernetesError(f"reading {flag}" if flag else _DID, found=message, fix=fix, field=field)

    def refuse_unknown(self, words: Sequence[str]) -> KubernetesError:
        """Return the error for a word that belongs to no option."""
        found = f"`{words[0]}` is neither the script nor an option's value"
        fix = "Arguments of the script come after `--`; fields of a pod that are not listed are written --name=value"
        return KubernetesError(_DID, found=found, fix=fix)


def make_parser() -> K8sParser:
    """Return the parser. Names in its result are fields of `KubernetesOptions`, and `target` and `module`."""
    parser = K8sParser(
        "ddpilot k8s",
        usage=_USAGE,
        description=_DESCRIPTION,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=120),
    )
    parser.add_argument("target", metavar="SCRIPT", help="a Python script in the image; with --module, a module")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, run as with `python -m`")
    for names, metavar, read, text in _OPTIONS:
        flags = names.split("/")
        name = next(flag for flag in flags if flag.startswith("--")).lstrip("-").replace("-", "_")
        parser.add_argument(*flags, dest=name, metavar=metavar, type=read, help=text)
    parser.add_argument(
        "--env", metavar="NAME=VALUE", action="append", type=_pair, help="a variable to set; repeatable"
    )
    parser.add_argument(
        "--volume",
        dest="volumes",
        metavar="CLAIM:PATH",
        action="append",
        help="a persistent volume claim to mount, CLAIM:PATH:ro to read only; repeatable",
    )
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def read_words(words: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values in `words` by name, `extra` with fields of the pods' spec, and the script's arguments."""
    end = words.index("--") if "--" in words else len(words)
    parser = make_parser()
    try:
        known, unknown = parser.parse_known_args(list(words[:end]))
    except argparse.ArgumentError as error:
        raise parser.refuse(error.argument_name, error.message) from error
    values, extra = dict(vars(known)), dict[str, Any]()
    for word in unknown:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--"):
            raise parser.refuse_unknown([word])
        known_names = [each[2:] for each in parser.flags]
        if guess := did_you_mean(flag[2:], known_names, show="--{}".format, cutoff=0.85):
            raise KubernetesError(_DID, found=f"{flag} is not an option", fix=guess, field=flag[2:].replace("-", "_"))
        extra[pod_field(flag[2:])] = _value(value) if equals else True
    if extra:
        values["extra"] = extra
    if "env" in values:
        values["env"] = dict(values["env"])
    if "volumes" in values:
        values["volumes"] = tuple(values["volumes"])
    return values, tuple(words[end + 1 :])


def _value(text: str) -> Any:
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
