# SPDX-License-Identifier: Apache-2.0
"""Environment variables of a rank: the ones torchrun sets, so that third-party code detects a torchrun job.

Source of the names: `torch/distributed/run.py`, "Environment Variables", and `torch/distributed/elastic/agent`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

LAUNCH_VARIABLE = "DDPILOT_LAUNCH"
"""Id of the launch. Equals TORCHELASTIC_RUN_ID in its ranks, and differs in a torchrun job started by one of them."""

SERVER_VARIABLE = "DDPILOT_RANK_SERVER"
"""Set in a rank server, so that a module that launches on import cannot start servers recursively."""

WATCHED_VARIABLE = "DDPILOT_WATCHED"
"""Set in ranks whose output is displayed live, in a terminal or a notebook."""

EXIT_REQUEUE = 75
"""Exit code of a rank that asks to be restarted, such as a Loop that saved a checkpoint: EX_TEMPFAIL of sysexits.h."""

FAILURE_FILE_VARIABLE = "DDPILOT_FAILURE_FILE"
"""Path where the first rank that raises in a Loop notes the update and the error; job scripts that requeue set it."""

_LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"
_IMPORT_TIME_PREFIXES = (
    *("TORCH", "PYTORCH_", "ATEN_", "TRITON_", "CUDA_", "NPY_"),  # TORCH: TORCHDYNAMO_ and TORCHINDUCTOR_ too
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_"),
    *("PYTHON", "LD_", "DYLD_", "MALLOC_", "GLIBC_", "LANG", "LC_"),
)


_SET_BY_TORCH = ("TORCHINDUCTOR_CACHE_DIR",)
"""Variables that torch sets when the first optimizer is created; torch reads them when it compiles."""


@dataclass(frozen=True, kw_only=True)
class NodePlacement:
    """The ranks of one node: `local_world_size` of `world_size` ranks, from `first_rank` on."""

    world_size: int
    local_world_size: int
    first_rank: int = 0
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"

    @property
    def ranks(self) -> range:
        """The ranks of the node."""
        return range(self.first_rank, self.first_rank + self.local_world_size)


def rank_variables(
    *,
    launch_id: str,
    rank: int,
    placement: NodePlacement,
    master_port: int,
    num_threads: int,
    backend: str | None,
    restart: int = 0,
) -> dict[str, str]:
    """The variables that make a process rank `rank` of a launch. They override the user's variables."""
    size = str(placement.world_size)
    number = str(rank)
    variables = {
        "RANK": number,
        "LOCAL_RANK": str(rank - placement.first_rank),
        "ROLE_RANK": number,
        "ROLE_NAME": "default",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "ROLE_WORLD_SIZE": size,
        "GROUP_RANK": str(placement.node_rank),
        "GROUP_WORLD_SIZE": str(placement.num_nodes),
        "MASTER_ADDR": placement.master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": launch_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCH_VARIABLE: launch_id,
        "OMP_NUM_THREADS": str(num_threads),
    }
    return variables if backend is None else variables | {"DDPILOT_BACKEND": backend}


def default_variables(*, stays: bool = False) -> dict[str, str]:
    """Variables that the user's own variables override.

    A single-node group listens on loopback, and ranks know whether their output is displayed. An NCCL error or timeout
    ends the rank, as under torchrun. With `stays`, a rank keeps running and its group is aborted instead.
    """
    return {
        **({WATCHED_VARIABLE: "1"} if is_watched() else {}),
        "GLOO_SOCKET_IFNAME": _LOOPBACK_INTERFACE,
        "NCCL_SOCKET_IFNAME": _LOOPBACK_INTERFACE,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0" if stays else "1",
    }


def is_watched() -> bool:
    """True if stderr is a terminal or a notebook cell."""
    stream = sys.stderr
    return stream is not None and (stream.isatty() or type(stream).__module__.partition(".")[0] == "ipykernel")


def import_time_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that libraries read on import. If one changes, a new rank server is needed."""
    read = (name for name in sorted(environ) if name.startswith(_IMPORT_TIME_PREFIXES))
    return {name: environ[name] for name in read if name not in _SET_BY_TORCH}


def module_paths() -> list[str]:
    """The entries of `sys.path` that are strings; the import system skips all others, such as a `pathlib.Path`."""
    paths: list[object] = list(sys.path)
    return [path for path in paths if isinstance(path, str)]


def python_command(code: str) -> list[str]:
    """Command line of a fresh interpreter, with the flags and the module path of this one, that executes `code`."""
    start = (
        "import sys; sys.path[:] = filter(None, sys.path); "  # do not import json.py of the working directory
        "import json; sys.path[:] = json.loads(sys.argv.pop()); "
    )
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", start + code, json.dumps(module_paths())]


def count_cores() -> int:
    """Number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_num_threads(environ: Mapping[str, str], nproc_per_node: int) -> int:
    """Threads per rank: OMP_NUM_THREADS if it is a positive number, else cores // ranks, at least 1."""
    text = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(text) if text.isdigit() and int(text) > 0 else max(1, count_cores() // nproc_per_node)
