# SPDX-License-Identifier: Apache-2.0
"""Render a manifest: text from `KubernetesOptions` and a command, without side effects.

Names and behaviour are those of the training operator 1.9 (`pkg/controller.v1/pytorch/envvar.go`, `master.go` and
`pkg/core/job.go`), and of JobSet v1alpha2 (`api/jobset/v1alpha2/jobset_types.go`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from textwrap import indent
from typing import Any

from ddpilot.kubernetes.options import REPLICATED_JOB, KubernetesOptions

_MASTER_PORT = 29500
"""Port where the nodes of a JobSet meet. Pods have addresses of their own, so jobs do not collide."""

_WORDS_OF_YAML = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
_PLAIN = re.compile(r"-{0,2}[A-Za-z_/][\w./@=$()+-]*(:[\w./@=$()+-]+)*", re.ASCII)
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def render_manifest(options: KubernetesOptions, target: str, args: Sequence[str] = (), *, module: bool = False) -> str:
    """Return the text of a manifest in YAML that runs `target` with `args` on all ranks.

    `target`: path of a Python script in the container, or with `module` the name of a module.
    """
    name = options.job_name or _default_name(options, target)
    command = _command(options, name, [*(["-m"] if module else []), target, *args])
    pod = list(_pod(options, command))
    spec = _jobset(options, pod) if options.kind == "jobset" else _pytorchjob(options, pod)
    lines = [*_head(options, name, target), "spec:", *_nested(spec)]
    return "\n".join(lines) + "\n"


def _head(options: KubernetesOptions, name: str, target: str) -> Iterator[str]:
    num, nodes = options.num_ranks_per_node, options.nodes
    yield f"# {' '.join(target.split())} on {_count(nodes * num, 'rank')}: {_count(nodes, 'node')} x {num}."
    needs = "ddpilot" if options.launcher == "ddpilot" else "no ddpilot"
    yield f"# Made by `ddpilot k8s`, and needs {needs} in the image: `kubectl create -f` submits it."
    if options.kind == "jobset":
        yield "apiVersion: jobset.x-k8s.io/v1alpha2"
        yield "kind: JobSet"
    else:
        yield "apiVersion: kubeflow.org/v1"
        yield "kind: PyTorchJob"
    yield "metadata:"
    yield f"  name: {_scalar(name)}"
    if options.namespace:
        yield f"  namespace: {_scalar(options.namespace)}"


def _default_name(options: KubernetesOptions, target: str) -> str:
    stem = re.sub(r"[^a-z0-9]+", "-", PurePath(target).stem.lower())
    return re.sub(r"^[^a-z]+", "", stem)[: options.longest_name].strip("-") or "job"


def _pytorchjob(options: KubernetesOptions, pod: list[str]) -> Iterator[str]:
    yield "# Ranks of each node. The operator makes WORLD_SIZE from it."
    yield f'nprocPerNode: "{options.num_ranks_per_node}"'
    yield "runPolicy:"
    yield "  # When the job ends, pods that still run are deleted: their ranks would wait for others and keep the GPUs."
    yield "  cleanPodPolicy: Running"
    if options.max_restarts:
        restarts = f"{_count(options.max_restarts, 'restart')} of {_count(options.nodes, 'node')}"
        yield f"  # {restarts}: the operator adds up those of all pods, and one more fails the job."
        yield f"  backoffLimit: {options.max_restarts * options.nodes + 1}"
    yield "pytorchReplicaSpecs:"
    yield "  # Node 0, where all ranks meet."
    yield "  Master:"
    yield from _nested(_replicas(options, 1), 4)
    shared = options.nodes > 1
    yield f"    template:{' &node' if shared else ''}"
    yield from _nested(["spec:", *_nested(pod)], 6)
    if shared:
        yield "  # The other nodes, with the same pods."
        yield "  Worker:"
        yield from _nested(_replicas(options, options.nodes - 1), 4)
        yield "    template: *node"


def _replicas(options: KubernetesOptions, num: int) -> Iterator[str]:
    yield f"replicas: {num}"
    yield f"restartPolicy: {'OnFailure' if options.max_restarts else 'Never'}"


def _jobset(options: KubernetesOptions, pod: list[str]) -> Iterator[str]:
    if options.nodes > 1:
        yield "network:"
        yield "  # A headless service, with the name of the JobSet, through which pods find each other by name."
        yield "  enableDNSHostnames: true"
    if options.max_restarts:
        yield "failurePolicy:"
        yield "  # All nodes are started again together."
        yield f"  maxRestarts: {options.max_restarts}"
    yield "replicatedJobs:"
    yield f"  - name: {REPLICATED_JOB}"
    yield "    replicas: 1"
    yield "    template:"
    yield "      spec:"
    yield "        # One pod per node; Kubernetes numbers them in JOB_COMPLETION_INDEX."
    yield "        completionMode: Indexed"
    yield f"        parallelism: {options.nodes}"
    yield f"        completions: {options.nodes}"
    yield "        # If a pod fails, all of them end: a single one could not join the others again."
    yield "        backoffLimit: 0"
    yield "        template:"
    yield "          spec:"
    yield from _nested(["restartPolicy: Never", *pod], 12)


def _pod(options: KubernetesOptions, command: list[str]) -> Iterator[str]:
    """The spec of a pod, without its restart policy, which each kind has in a different place."""
    for name, value in options.extra.items():
        yield f"{name}: {_json(value)}"
    yield "containers:"
    if options.kind == "pytorchjob":
        yield "  # The operator looks for this name."
    yield "  - name: pytorch"
    yield from _nested(_container(options, command), 4)
    claims = _claims(options)
    yield "volumes:"
    yield "  - name: shm"
    yield "    emptyDir:"
    yield "      medium: Memory"
    if options.shared_memory:
        yield f"      sizeLimit: {_scalar(options.shared_memory)}"
    for i, claim in enumerate(claims):
        yield f"  - name: volume-{i}"
        yield "    persistentVolumeClaim:"
        yield f"      claimName: {_scalar(claim)}"


def _container(options: KubernetesOptions, command: list[str]) -> Iterator[str]:
    yield f"image: {_scalar(options.image)}"
    if options.nodes > 1:
        yield from _where_variables_come_from(options)
    yield "command:"
    yield from (f"  - {word}" for word in command)
    if options.chdir:
        yield f"workingDir: {_scalar(options.chdir)}"
    env = list(_env(options))
    if env:
        yield "env:"
        yield from _nested(env)
    yield from _resources(options)
    yield "volumeMounts:"
    yield "  # Workers of a DataLoader pass batches through it; a container has 64 MB of it by default."
    yield "  - name: shm"
    yield "    mountPath: /dev/shm"
    claims = _claims(options)
    for mount in options.mounts:
        yield f"  - name: volume-{claims.index(mount.claim)}"
        yield f"    mountPath: {_scalar(mount.path)}"
        if mount.read_only:
            yield "    readOnly: true"


def _where_variables_come_from(options: KubernetesOptions) -> Iterator[str]:
    agent = "torchrun" if options.launcher == "torchrun" else "`ddpilot run`"
    yield f"# One {agent} per node, which starts the ranks of its node."
    if options.kind == "jobset":
        yield "# The host name is that of pod 0; Kubernetes fills in $(JOB_COMPLETION_INDEX), the number of the pod."
    else:
        yield "# Kubernetes fills in what the operator sets: $(RANK) is the node's, which its ranks do not see."


def _command(options: KubernetesOptions, name: str, script: Sequence[str]) -> list[str]:
    """The words that start the ranks of a node, as they stand in the manifest."""
    if options.launcher == "ddpilot":
        agent = [options.python, "-m", "ddpilot", "run"]
    elif options.python == "python":
        agent = ["torchrun"]
    else:
        agent = [options.python, "-m", "torch.distributed.run"]
    words = [_scalar(_literal(word)) for word in agent]
    words.append(_scalar(f"--nproc-per-node={options.num_ranks_per_node}"))
    if options.nodes > 1:
        words += map(_scalar, _meet(options, name))
    else:
        words.append("--standalone")
    return [*words, *(_scalar(_literal(word)) for word in script)]


def _meet(options: KubernetesOptions, name: str) -> Iterator[str]:
    yield f"--nnodes={options.nodes}"
    if options.kind == "jobset":
        yield "--node-rank=$(JOB_COMPLETION_INDEX)"
        yield f"--master-addr={name}-{REPLICATED_JOB}-0-0.{name}"
        yield f"--master-port={_MASTER_PORT}"
    else:
        yield "--node-rank=$(RANK)"
        yield "--master-addr=$(MASTER_ADDR)"
        yield "--master-port=$(MASTER_PORT)"


def _env(options: KubernetesOptions) -> Iterator[str]:
    values = dict(options.env)
    if options.kind == "jobset" and "PYTHONUNBUFFERED" not in values:
        yield "# Output is shown at once. The training operator sets it by itself."
        yield from _variable("PYTHONUNBUFFERED", "1")
    if options.cpus_per_task is not None:
        per_rank = max(1, options.cpus_per_task // options.num_ranks_per_node)
        threads = {"OMP_NUM_THREADS": str(per_rank), "NUM_WORKERS": str(per_rank - 1)}
        if threads := {name: value for name, value in threads.items() if name not in values}:
            cores = _count(per_rank, "core")
            yield f"# {cores} for each rank: as many threads, and workers for scripts that read NUM_WORKERS."
        for name, value in threads.items():
            yield from _variable(name, value)
    for name, value in values.items():
        yield from _variable(name, value)


def _variable(name: str, value: str) -> Iterator[str]:
    yield f"- name: {_scalar(name)}"
    yield f"  value: {_scalar(_literal(value))}"


def _resources(options: KubernetesOptions) -> Iterator[str]:
    requests, limits = {}, {}
    if options.cpus_per_task is not None:
        requests["cpu"] = f'"{options.cpus_per_task}"'
    if options.mem:
        requests["memory"] = limits["memory"] = _scalar(options.mem)
    if options.num_gpus_per_node:
        limits[options.gpu_resource] = str(options.num_gpus_per_node)
    if not limits and not requests:
        return
    yield "resources:"
    if requests:
        if "cpu" in requests:
            yield "  # Cores are reserved and not limited: a limit would stop ranks for parts of a second."
        yield "  requests:"
        yield from (f"    {name}: {value}" for name, value in requests.items())
    if limits:
        yield "  limits:"
        yield from (f"    {name}: {value}" for name, value in limits.items())


def _claims(options: KubernetesOptions) -> list[str]:
    return list(dict.fromkeys(mount.claim for mount in options.mounts))


def _literal(text: str) -> str:
    """`text` for a field in which Kubernetes replaces $(NAME) by a variable and $$ by $."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _scalar(text: str) -> str:
    """`text` as a string of YAML, in double quotes where it would be read as something else without."""
    return text if _PLAIN.fullmatch(text) and text.lower() not in _WORDS_OF_YAML else _json(text)


def _json(value: Any) -> str:
    """`value` as JSON, which is YAML too."""
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def _nested(lines: Iterable[str], spaces: int = 2) -> list[str]:
    return [indent(line, " " * spaces) for line in lines]


def _count(num: int, noun: str) -> str:
    return f"{num} {noun}{'' if num == 1 else 's'}"
