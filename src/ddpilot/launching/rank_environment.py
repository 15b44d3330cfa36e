# SPDX-License-Identifier: Apache-2.0
"""Environment variables of a rank, as torchrun sets them, and what `nproc_per_node` means on this machine.

Source of the names: `torch/distributed/run.py`, "Environment Variables", and `torch/distributed/elastic/agent`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ddpilot.environments.nvml import count_accelerators
from ddpilot.errors import LaunchError

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


def _as_argument(value: int | str) -> str:
    return f"`nproc_per_node={json.dumps(value)}`"


def resolve_nproc(
    asked: int | str,
    environ: Mapping[str, str],
    note: Callable[[str], None],
    *,
    backend: str | None = None,
    write: Callable[[int | str], str] = _as_argument,
) -> int:
    """Number of ranks that `asked` means for ranks with `environ`. Shows a hint, by `note`, if that may be unexpected.

    `backend`: backend of the ranks' process group, None if it is chosen for the device; `write`: how the option is
    written where it was given. Raises LaunchError for "gpu" if no GPU is visible, and for ranks that would share a GPU
    over NCCL.
    """
    if asked == "cpu":
        return count_cores()
    num_gpus = count_accelerators(environ)
    if isinstance(asked, int):
        if 0 < num_gpus < asked:
            _check_sharing(asked, num_gpus, note, backend, write)
        return asked
    if asked == "gpu" and num_gpus == 0:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        raise LaunchError(
            f"counting ranks for {write('gpu')}",
            found=f"no GPU is visible{'' if visible is None else f' (CUDA_VISIBLE_DEVICES={visible!r})'}",
            fix=f"Check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use {write(2)} or {write('cpu')}",
        )
    if num_gpus == 0:
        note(f"no GPU found, so one rank runs on the CPU; {write(2)} starts two ({count_cores()} cores here)")
    return max(1, num_gpus)


def _check_sharing(
    asked: int, num_gpus: int, note: Callable[[str], None], backend: str | None, write: Callable[[int | str], str]
) -> None:
    found = f"{asked} ranks on {num_gpus} GPU{'s' * (num_gpus > 1)}"
    if backend is not None and "nccl" in backend:
        raise LaunchError(
            f'starting {asked} ranks with `backend="{backend}"`',
            found=f"{found}; NCCL refuses two ranks on one GPU",
            fix=f'Use {write(num_gpus)}, or `backend="gloo"` to share GPUs',
        )
    note(f"{found}: `init_group()` uses gloo, since NCCL refuses two ranks on one GPU")
