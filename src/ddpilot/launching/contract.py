# SPDX-License-Identifier: Apache-2.0
"""The environment of a rank: torchrun's contract, so that third-party code sees a torchrun job.

Source of the names: `torch/distributed/run.py`, "Environment Variables", and `torch/distributed/elastic/agent`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

LAUNCH_VARIABLE = "DDPILOT_LAUNCH"
"""Names the launch; equal to TORCHELASTIC_RUN_ID in its ranks, different where torchrun was started inside one."""

SERVER_VARIABLE = "DDPILOT_RANK_SERVER"
"""Is set in a rank server, so that a module which launches when it is imported cannot start servers for ever."""

WATCHED_VARIABLE = "DDPILOT_WATCHED"
"""Is set in ranks whose output somebody sees as it comes: in a terminal or in a notebook."""

EXIT_REQUEUE = 75
"""Exit code of a rank that asks to be started again, as a Loop's that has saved: EX_TEMPFAIL of sysexits.h."""

_LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"
_IMPORT_TIME_PREFIXES = (
    *("TORCH", "PYTORCH_", "ATEN_", "TRITON_", "CUDA_", "NPY_"),  # TORCH: TORCHDYNAMO_ and TORCHINDUCTOR_ too
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_"),
    *("PYTHON", "LD_", "DYLD_", "MALLOC_", "GLIBC_", "LANG", "LC_"),
)


_SET_BY_TORCH = ("TORCHINDUCTOR_CACHE_DIR",)
"""Set when the first optimizer is made, and read when something is compiled."""


def rank_variables(
    *, launch_id: str, rank: int, nproc_per_node: int, master_port: int, num_threads: int, backend: str | None
) -> dict[str, str]:
    """The variables that make a process rank `rank` of a single-node launch; they win over the user's."""
    size = str(nproc_per_node)
    number = str(rank)
    variables = {
        "RANK": number,
        "LOCAL_RANK": number,
        "ROLE_RANK": number,
        "ROLE_NAME": "default",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": launch_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCH_VARIABLE: launch_id,
        "OMP_NUM_THREADS": str(num_threads),
    }
    return variables if backend is None else variables | {"DDPILOT_BACKEND": backend}


def default_variables(*, stays: bool = False) -> dict[str, str]:
    """Variables that the user's own win over.

    A group on one node listens on loopback, and ranks know whether somebody is watching. NCCL's errors and time limits
    end the rank, as under torchrun; a rank that `stays` keeps its variables, and is freed by aborting NCCL instead.
    """
    return {
        **({WATCHED_VARIABLE: "1"} if is_watched() else {}),
        "GLOO_SOCKET_IFNAME": _LOOPBACK_INTERFACE,
        "NCCL_SOCKET_IFNAME": _LOOPBACK_INTERFACE,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0" if stays else "1",
    }


def is_watched() -> bool:
    """Is stderr a terminal, or a cell of a notebook?"""
    stream = sys.stderr
    return stream is not None and (stream.isatty() or type(stream).__module__.partition(".")[0] == "ipykernel")


def import_time_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that libraries read when they are imported: a change of one needs a new rank server."""
    read = (name for name in sorted(environ) if name.startswith(_IMPORT_TIME_PREFIXES))
    return {name: environ[name] for name in read if name not in _SET_BY_TORCH}


def module_paths() -> list[str]:
    """The entries of `sys.path` that imports use; Python skips all others, such as a `pathlib.Path`."""
    paths: list[object] = list(sys.path)
    return [path for path in paths if isinstance(path, str)]


def count_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_num_threads(environ: Mapping[str, str], nproc_per_node: int) -> int:
    """Threads per rank: OMP_NUM_THREADS if it is set to a number, else cores / ranks, at least 1."""
    text = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(text) if text.isdigit() and int(text) > 0 else max(1, count_cores() // nproc_per_node)
