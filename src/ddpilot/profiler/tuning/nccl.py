# SPDX-License-Identifier: Apache-2.0
"""The environment variables that the installed NCCL reads, from the strings of its library. No torch."""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

KNOWN_FROM_THE_WEB = (
    *("NCCL_TIMEOUT", "NCCL_SOCKET_TIMEOUT", "NCCL_BUFFER_SIZE", "NCCL_MAX_RINGS", "NCCL_NUM_CHANNELS"),
    *("NCCL_TREE_THRESHOLD", "NCCL_LL_THRESHOLD", "NCCL_IFNAME", "NCCL_IB_RETRY", "NCCL_IB_CUDA_SUPPORT"),
)
"""Names from forums, guides and old documentation. The installed library shows which of them have no effect."""
_OF_TORCH = (
    *("NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING"),
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
)
"""Names that torch reads itself, as older spellings of those that begin with TORCH_NCCL_."""
_BEGIN = b"\0NCCL_"
_NAME = re.compile(rb"\x00(NCCL_[A-Z0-9_]{2,60})\x00")
_LIBRARIES = (("nvidia.nccl", "lib"), ("torch", "lib"))
_FILES = ("libnccl.so.2", "libnccl.so", "librccl.so.1", "librccl.so", "libtorch_cuda.so")
"""The last one contains NCCL if it is linked statically."""


def find_library() -> Path | None:
    """Return the library with NCCL that torch uses; None if there is none, as with a torch for CPUs."""
    folders = [Path(path) / below for package, below in _LIBRARIES for path in _folders_of(package)]
    return next((folder / name for folder in folders for name in _FILES if (folder / name).is_file()), None)


def _folders_of(package: str) -> list[str]:
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:  # no package around it
        return []
    return list(spec.submodule_search_locations or ()) if spec is not None else []


def read_names(library: Path) -> frozenset[str]:
    """Return the names of variables in `library`: NCCL passes each of them to `getenv` as a whole string."""
    found = set()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        place = data.find(_BEGIN)
        while place >= 0:
            match = _NAME.match(data, place)
            if match is not None:
                found.add(match[1].decode())
            place = data.find(_BEGIN, place + 1)
    return frozenset(found)


def describe_unknown(names: frozenset[str], environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable of NCCL in `environ` that does nothing, and one about well-known names.

    `names`: those that the installed NCCL knows.
    """
    found = []
    for name in sorted(environ):
        if not name.startswith("NCCL_") or name in names:
            continue
        if name in _OF_TORCH:
            found.append(f"{name} is not read by NCCL; torch reads it as TORCH_{name}")
        else:
            found.append(f"{name}={environ[name]} does nothing: the installed NCCL does not know the name")
    absent = ", ".join(name for name in KNOWN_FROM_THE_WEB if name not in names)
    if absent:
        found.append(f"names that are recommended here and there and do nothing in the installed NCCL: {absent}")
    return found
