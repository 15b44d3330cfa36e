# SPDX-License-Identifier: Apache-2.0
"""Read Slurm's variables, as srun sets them for each task of a step.

A batch script and an interactive shell have the job's variables too (``SLURM_NTASKS=4``, ``SLURM_PROCID=0``), although
they are a single process: only a step that srun started has ranks. In a step, the step's variables take precedence over
the job's, which may be stale.
"""

from __future__ import annotations

import re
from itertools import islice, product

from ddpilot.environments.topology import Topology, alone
from ddpilot.environments.variables import (
    Environ,
    derive_port,
    first_set,
    missing,
    or_raise,
    quote,
    read_int,
    read_master,
    read_text,
    require_int,
)
from ddpilot.errors import TopologyError

_DID = "reading Slurm's variables"
_STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")
_JOB_ID = ("SLURM_JOB_ID", "SLURM_JOBID")
_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_SRUN_HINT = "start the program with srun, as in `srun python train.py`"

# Slurm's ids of steps that srun did not start (slurm.h: SLURM_BATCH_SCRIPT, SLURM_EXTERN_CONT,
# SLURM_INTERACTIVE_STEP), and their names.
_SHELL_STEPS = {
    "4294967291": "the batch script itself",
    "batch": "the batch script itself",
    "4294967292": "a shell in the allocation",
    "extern": "a shell in the allocation",
    "4294967290": "an interactive shell",
    "interactive": "an interactive shell",
}


def detect_slurm(environ: Environ) -> Topology | None:
    """The topology of a task that srun started, `alone` elsewhere in an allocation, None outside of Slurm.

    A step of one task is `alone`. Raises `TopologyError` if variables are missing or contradict each other.
    """
    if first_set(environ, *_JOB_ID, "SLURM_PROCID") is None:
        return None
    step = read_text(environ, *_STEP_ID)
    if step in _SHELL_STEPS or (step is None and not read_int(environ, "SLURM_PROCID")):
        where = _SHELL_STEPS[step] if step else "the batch script or a shell of the allocation, not a task of srun"
        shown = quote(environ, first_set(environ, *_STEP_ID) or "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID")
        unset = "" if step else " and SLURM_STEP_ID is not set"
        return alone(f"Alone: this is {where} ({shown}{unset}); for several ranks {_SRUN_HINT}")
    fix = f"Set SLURM_NTASKS to the number of tasks, or {_SRUN_HINT}"
    error = missing(environ, _DID, "SLURM_NTASKS", fix=fix, related=("SLURM_PROCID", *_STEP_ID))
    world_size = or_raise(read_int(environ, *_NUM_TASKS, minimum=1), error)
    if world_size == 1:
        shown = quote(environ, first_set(environ, *_STEP_ID) or "SLURM_PROCID", first_set(environ, *_NUM_TASKS) or "")
        return alone(f"Alone: srun started one task ({shown}); for several ranks use srun --ntasks")
    return _describe_task(environ, world_size)


def _describe_task(environ: Environ, world_size: int) -> Topology:
    rank = _require_number(environ, "SLURM_PROCID", world_size)
    hosts, hosts_from = _read_hosts(environ)
    fix = f"Set SLURM_STEP_NODELIST as srun does, or {_SRUN_HINT}"
    nnodes = len(hosts) or require_int(environ, _DID, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", fix=fix, minimum=1)
    only_node = nnodes == 1 and read_text(environ, "SLURM_NODEID") is None
    node_rank = 0 if only_node else _require_number(environ, "SLURM_NODEID", nnodes)
    local_world_size = _read_local_world_size(environ, world_size, nnodes, node_rank)
    local_rank = _require_number(environ, "SLURM_LOCALID", local_world_size)
    master_addr, master_port = read_master(environ)
    if master_addr is None and not hosts:
        fix = "Set SLURM_STEP_NODELIST as srun does, or MASTER_ADDR to the host name of rank 0"
        raise missing(environ, _DID, "SLURM_STEP_NODELIST", fix=fix, related=("SLURM_PROCID", *_NUM_TASKS))
    return Topology(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=node_rank,
        nnodes=nnodes,
        master_addr=master_addr or hosts[0],
        master_port=master_port or _derive_port(environ),
        environment="slurm",
        how=_explain(environ, hosts_from, master_addr is None, master_port is None),
    )


def _explain(environ: Environ, hosts_from: str, derived_addr: bool, derived_port: bool) -> str:
    tasks = first_set(environ, *_NUM_TASKS) or ""
    step = first_set(environ, *_STEP_ID) or ""
    task = quote(environ, "SLURM_PROCID", tasks, "SLURM_LOCALID", "SLURM_NODEID")
    address = f"first host of {quote(environ, hosts_from)}" if derived_addr else quote(environ, "MASTER_ADDR")
    job = quote(environ, first_set(environ, *_JOB_ID) or "", step)
    port = f"port from {job}" if derived_port else quote(environ, "MASTER_PORT")
    return f"srun set {task}; {address}; {port}"


def _require_number(environ: Environ, name: str, size: int) -> int:
    value = require_int(environ, _DID, name, fix=f"Set {name} as srun does, or {_SRUN_HINT}")
    if value >= size:
        sizes = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
        raise TopologyError(
            _DID,
            variable=name,
            found=f"{name}={value}, but it counts from 0 and there are {size} ({quote(environ, *_NUM_TASKS, *sizes)})",
            fix=f"Leave these variables as srun set them, or correct {name}",
        )
    return value


def _read_hosts(environ: Environ) -> tuple[tuple[str, ...], str]:
    """Hosts of this step and the variable that lists them; no hosts and "" if none is set."""
    variable = first_set(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if variable is None:
        return (), ""
    hosts = tuple(dict.fromkeys(parse_node_list(environ[variable], variable=variable)))
    count = "SLURM_STEP_NUM_NODES" if variable == "SLURM_STEP_NODELIST" else "SLURM_NNODES"
    given = read_int(environ, count, minimum=1)
    if given is not None and given != len(hosts):
        raise TopologyError(
            _DID,
            variable=variable,
            found=f"{quote(environ, variable)} has {len(hosts)} hosts, but {quote(environ, count)}",
            fix="Set SLURM_STEP_NODELIST to the hosts of this step, or leave both as srun set them",
        )
    return hosts, variable


def _read_local_world_size(environ: Environ, world_size: int, nnodes: int, node_rank: int) -> int:
    step_wide = read_text(environ, "SLURM_STEP_TASKS_PER_NODE") is not None
    variable = "SLURM_STEP_TASKS_PER_NODE" if step_wide else "SLURM_TASKS_PER_NODE"
    text = read_text(environ, variable)
    if text is None:
        if world_size % nnodes:
            fix = "Set it as srun does, such as 2(x3),1"
            raise missing(environ, _DID, "SLURM_STEP_TASKS_PER_NODE", fix=fix, related=(*_NUM_TASKS, "SLURM_NNODES"))
        return world_size // nnodes
    counts = parse_tasks_per_node(text, variable=variable)
    if len(counts) != nnodes or sum(counts) != world_size:
        raise TopologyError(
            _DID,
            variable=variable,
            found=f"{variable}={text} means {sum(counts)} tasks on {len(counts)} nodes, "
            f"but this step has {world_size} tasks on {nnodes} nodes",
            fix="Leave these variables as srun set them, or unset the one that a different program changed",
        )
    return counts[node_rank]


def _derive_port(environ: Environ) -> int:
    fix = "Set SLURM_JOB_ID as Slurm does, or MASTER_PORT to the same free port on every rank"
    job = or_raise(read_text(environ, *_JOB_ID), missing(environ, _DID, "SLURM_JOB_ID", fix=fix))
    return derive_port(job, read_int(environ, *_STEP_ID) or 0)


MAX_NODES = 65_536
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_PAIRED = re.compile(r"(?:[^\[\]]|\[[^\[\]]*\])*")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def parse_node_list(text: str, *, variable: str = "SLURM_JOB_NODELIST") -> tuple[str, ...]:
    """The host names in `text`, in Slurm's order (first bracket slowest), at most 65,536.

    Numbers keep the zero padding of their range's low end; several brackets in one name multiply. Raises
    `TopologyError` naming `variable` for an empty list, an empty name, an invalid bracket or a descending range.
    """
    if not _PAIRED.fullmatch(text):
        raise _refuse(text, variable, "brackets that do not pair")
    hosts: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text.strip()):  # at commas outside of brackets
        # Pieces at odd indices are the contents of brackets.
        pieces = re.split(r"[\[\]]", item)
        choices = [_expand_ranges(piece, text, variable) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        names = ["".join(parts) for parts in islice(product(*choices), MAX_NODES + 1)]
        if "" in names:
            raise _refuse(text, variable, "an empty host name")
        hosts += names
        if len(hosts) > MAX_NODES:
            raise _refuse(text, variable, f"more than {MAX_NODES} hosts")
    return tuple(hosts)


def parse_tasks_per_node(text: str, *, variable: str = "SLURM_TASKS_PER_NODE") -> tuple[int, ...]:
    """Tasks on each node, in node order: ``2(x3),1`` is (2, 2, 2, 1). Raises `TopologyError` naming `variable`."""
    counts: list[int] = []
    for item in text.strip().split(","):
        match = _COUNT.fullmatch(item.strip())
        repeats = int(match[2] or 1) if match else 0
        if match is None or not 1 <= repeats <= MAX_NODES or int(match[1]) < 1:
            raise TopologyError(
                f"reading {variable}",
                variable=variable,
                found=f"{variable}={text!r}, where {item!r} is not a task count",
                fix=f"Slurm writes it like 2(x3),1: leave {variable} as srun set it, or unset it",
            )
        counts += [int(match[1])] * repeats
    return tuple(counts)


def _expand_ranges(ranges: str, text: str, variable: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        low, high = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(low) > int(high):
            raise _refuse(text, variable, f"{item!r} in brackets, which is neither a number nor an ascending range")
        if int(high) - int(low) >= MAX_NODES:
            raise _refuse(text, variable, f"more than {MAX_NODES} hosts")
        numbers += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
    return numbers


def _refuse(text: str, variable: str, why: str) -> TopologyError:
    return TopologyError(
        f"expanding the node list in {variable}",
        variable=variable,
        found=f"{variable}={text!r} has {why}",
        fix=f"Slurm writes it like gra[003-005,9],b1: leave {variable} as Slurm set it, or correct it",
    )
