# SPDX-License-Identifier: Apache-2.0
"""`KubernetesOptions`: what the pods of a job ask for and how their ranks start; wrong values are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from ddpilot.errors import MISSPELT, KubernetesError, did_you_mean

Kind = Literal["pytorchjob", "jobset"]
Launcher = Literal["torchrun", "ddpilot"]

LONGEST_LABEL = 63
"""Characters that Kubernetes allows in the name of a service and in a host name."""

REPLICATED_JOB = "node"
"""Name of the only replicated job of a JobSet: part of the names of its pods."""

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SIZE = r"(?=.*[1-9])\d+(\.\d+)?(Ki|Mi|Gi|Ti|[kMGT])"
_SIZE_WORDS = "a number with Mi, Gi or Ti (powers of 1024) or M, G or T (powers of 1000), such as "
_PATTERNS: dict[str, tuple[str, str]] = {
    "image": (r"[A-Za-z0-9][\w./:@-]*", "the name of a container image, such as pytorch/pytorch:latest"),
    "gpus_per_node": (
        r"([a-z0-9][a-z0-9.-]*/[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?:)?[1-9]\d*",
        "a number of GPUs, or RESOURCE:NUMBER such as amd.com/gpu:4",
    ),
    "mem": (_SIZE, f"{_SIZE_WORDS}64Gi"),
    "shared_memory": (_SIZE, f"{_SIZE_WORDS}16Gi"),
    "namespace": (_LABEL, "a name of lower-case letters, digits and -"),
    "job_name": (
        r"[a-z]([-a-z0-9]*[a-z0-9])?",
        "a name of lower-case letters, digits and -, which begins with a letter",
    ),
    "chdir": (r"/.*", "an absolute path in the container"),
}
"""Values that are accepted for a field, as a pattern and in words. All other fields take any text of one line."""

_VOLUME = rf"(?P<claim>{_LABEL}(\.{_LABEL})*):(?P<path>/[^:]+?)/?(?P<read_only>:ro)?"
_UNITS = {
    **{unit: 1000**power for power, unit in enumerate(("k", "M", "G", "T"), 1)},
    **{unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti"), 1)},
}
_SET_FOR_RANKS = ("JOB_COMPLETION_INDEX", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
_SUBSTITUTES = {
    other: name
    for name, others in {
        "job_name": ("name",),
        "image": ("container_image", "containers"),
        "nodes": ("nnodes", "replicas"),
        "nproc_per_node": ("nproc", "nprocPerNode", "ntasks"),
        "gpus_per_node": ("gpus", "gpu", "gres"),
        "cpus_per_task": ("cpu", "cpus"),
        "mem": ("memory", "mem_per_cpu", "mem_per_gpu"),
        "shared_memory": ("shm_size", "shmSize"),
        "chdir": ("workingDir",),
        "volumes": ("volumeMounts",),
        "max_restarts": ("backoffLimit", "maxRestarts", "restartPolicy", "requeue"),
    }.items()
    for other in others
}
"""The field of the options, by the name that Slurm, torchrun or Kubernetes has for it."""

_POD_FIELDS = (
    *("activeDeadlineSeconds", "affinity", "automountServiceAccountToken", "dnsConfig", "dnsPolicy", "hostAliases"),
    *("enableServiceLinks", "hostIPC", "hostNetwork", "hostPID", "imagePullSecrets", "initContainers", "nodeSelector"),
    *("nodeName", "preemptionPolicy", "priority", "priorityClassName", "runtimeClassName", "schedulerName"),
    *("schedulingGates", "securityContext", "serviceAccountName", "shareProcessNamespace", "tolerations"),
    *("terminationGracePeriodSeconds", "topologySpreadConstraints"),
)
"""Fields of a pod that people set, for proposals: others are passed through too."""


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """Resources of the pods of a job, and how their ranks start. Raises KubernetesError, with the field's name, for a
    wrong value.

    There is one pod per node. Fields with the meaning of one of `JobOptions` have its name; their values are written as
    Kubernetes writes them.
    """

    image: str
    """Container image of all pods, which has the script and torch."""

    kind: Kind = "pytorchjob"
    """"pytorchjob": of Kubeflow's training operator, version 1; "jobset": of the JobSet controller."""

    nodes: int = 1
    """Number of nodes."""

    nproc_per_node: int | None = None
    """Ranks on each node. None: one per GPU that `gpus_per_node` asks for, else 1."""

    launcher: Launcher = "torchrun"
    """Program that starts the ranks of a node: "torchrun", or "ddpilot" (`ddpilot run`), which the image must have."""

    python: str = "python"
    """The interpreter, in the image."""

    gpus_per_node: int | str | None = None
    """GPUs on each node: a number of nvidia.com/gpu, or RESOURCE:NUMBER such as "amd.com/gpu:4"."""

    cpus_per_task: int | None = None
    """Cores of each task. A task is a node's agent with its ranks."""

    mem: str | None = None
    """Memory of each node, such as "64Gi": reserved, and the limit."""

    shared_memory: str | None = None
    """Size of /dev/shm, such as "16Gi", which counts as memory of the pod. None: as much as the pod may have."""

    namespace: str | None = None
    """Namespace of the job. None: that of the command that submits it."""

    job_name: str | None = None
    """Name of the job. None: the script's, without its ending."""

    chdir: str | None = None
    """Folder to run in. None: the one of the image."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to set."""

    volumes: tuple[str, ...] = ()
    """Persistent volume claims to mount on all nodes, each as CLAIM:PATH, or CLAIM:PATH:ro to read only."""

    max_restarts: int = 0
    """How often the job is started again after a failure, all nodes together."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the pods' spec by name, such as "serviceAccountName" or "tolerations": values as in JSON."""

    def __post_init__(self) -> None:
        for name in ("nodes", "nproc_per_node", "cpus_per_task"):
            self._check_count(name, 1)
        self._check_count("max_restarts", 0)
        for each in fields(self):
            self._check_text(each.name)
        for name, choices in (("kind", get_args(Kind)), ("launcher", get_args(Launcher))):
            if getattr(self, name) not in choices:
                raise refusal(name, getattr(self, name), f"Give one of {', '.join(choices)}")
        if self.job_name and len(self.job_name) > self.longest_name:
            fix = f"Give at most {self.longest_name} characters: names of pods are made from it"
            raise refusal("job_name", self.job_name, fix)
        if self.mem and self.shared_memory and _num_bytes(self.shared_memory) > _num_bytes(self.mem):
            fix = "Shared memory counts as memory of the pod: give at most `mem`, or leave it out"
            raise refusal("shared_memory", self.shared_memory, fix, beside=f"`mem` {self.mem!r}")
        self._check_volumes()
        self._check_env()
        self._check_extra()

    def _check_count(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise refusal(name, value, f"Give a whole number of at least {least}")

    def _check_text(self, name: str) -> None:
        value = getattr(self, name)
        if name == "gpus_per_node" and isinstance(value, int):
            value = str(value)
        if name in _PATTERNS and not isinstance(value, str) and (value is not None or name == "image"):
            raise refusal(name, value, f"Give {_PATTERNS[name][1]}")
        if not isinstance(value, str):
            return
        if not value.strip() or re.search(r"[\n\r\0]", value):
            raise refusal(name, value, "Give text of one line, or leave it out")
        pattern, words = _PATTERNS.get(name, (".+", "text of one line"))
        if not re.fullmatch(pattern, value):
            raise refusal(name, value, f"Give {words}")

    def _check_volumes(self) -> None:
        given: object = self.volumes
        if isinstance(given, str):
            raise refusal("volumes", given, f"Give a tuple: ({given!r},)")
        for volume in self.volumes:
            if not re.fullmatch(_VOLUME, volume) or re.search(r"[\n\r\0]", volume):
                raise refusal("volumes", volume, "Give CLAIM:PATH, such as data:/data, or data:/data:ro to read only")
        paths = ["/dev/shm", *(mount.path for mount in self.mounts)]
        for i, path in enumerate(paths):
            if path in paths[:i]:
                raise refusal("volumes", self.volumes[i - 1], f"There is a volume at {path}: give a different path")

    def _check_env(self) -> None:
        values: Mapping[str, object] = self.env
        for name, value in values.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", name) or not isinstance(value, str) or re.search(r"[\n\r\0]", value):
                raise refusal("env", f"{name}={value}", "Give names of variables, and values of one line")
            if name in _SET_FOR_RANKS or name.startswith("PET_"):
                raise refusal("env", f"{name}={value}", f"{name} is set for each node or rank: leave it out")

    def _check_extra(self) -> None:
        known = [each.name for each in fields(self)]
        for name, value in self.extra.items():
            if name in _SUBSTITUTES:
                raise refusal(name, value, f"The field is {_SUBSTITUTES[name]}")
            if guess := did_you_mean(name, [*known, *_POD_FIELDS], cutoff=MISSPELT) if name not in _POD_FIELDS else "":
                raise refusal(name, value, guess)
            if not re.fullmatch(r"[a-z][A-Za-z0-9]*", name):
                raise refusal(name, value, "Give the name of a field of a pod's spec, such as serviceAccountName")
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise refusal(name, value, "Give a value of JSON: text, number, true, list or mapping") from error

    @property
    def gpu_resource(self) -> str:
        """Name by which GPUs are asked for."""
        return str(self.gpus_per_node or "").rpartition(":")[0] or "nvidia.com/gpu"

    @property
    def num_gpus_per_node(self) -> int:
        """GPUs on each node; 0 if none are asked for."""
        return int(str(self.gpus_per_node or 0).rpartition(":")[2])

    @property
    def num_ranks_per_node(self) -> int:
        """Ranks on each node: `nproc_per_node`, or the number of GPUs, or 1."""
        return self.nproc_per_node or self.num_gpus_per_node or 1

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """`volumes`, taken apart."""
        found = [match for volume in self.volumes if (match := re.fullmatch(_VOLUME, volume))]
        return tuple(Mount(claim=m["claim"], path=m["path"], read_only=m["read_only"] is not None) for m in found)

    @property
    def longest_name(self) -> int:
        """Characters that the name of the job may have, so that those of its pods and services are not too long."""
        if self.kind == "jobset":
            # Kubernetes adds five random characters to the name of a pod of an indexed job.
            return LONGEST_LABEL - len(f"-{REPLICATED_JOB}-0-{self.nodes - 1}-12345")
        return LONGEST_LABEL - len(f"-worker-{max(self.nodes - 2, 0)}")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """Mount of a persistent volume claim."""

    claim: str
    path: str
    read_only: bool


def refusal(name: str, value: object, fix: str, *, beside: str = "") -> KubernetesError:
    """Return the error for a wrong value of a field."""
    found = f"`{name}` is {value!r}{f', with {beside}' if beside else ''}"
    return KubernetesError("reading the options of the manifest", found=found, fix=fix, field=name)


def pod_field(name: str) -> str:
    """Return the field of a pod's spec that `name` of the command line stands for: camel case, or as it is."""
    if name.replace("-", "_") in _SUBSTITUTES:
        return name.replace("-", "_")
    return re.sub(r"[-_]+([A-Za-z0-9])", lambda found: found[1].upper(), name)


def _num_bytes(size: str) -> float:
    number, unit = re.findall(r"[\d.]+|[A-Za-z]+", size)
    return float(number) * int(_UNITS[unit])
