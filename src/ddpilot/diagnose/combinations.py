# SPDX-License-Identifier: Apache-2.0
"""Combinations of settings and versions that are known not to work, each with its source."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from ddpilot.diagnose.facts import Facts
from ddpilot.environments.nvml import count_accelerators
from ddpilot.environments.variables import quote
from ddpilot.findings.finding import Severity


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One known bad combination."""

    applies: Callable[[Facts], str]
    """Return what was found, such as ``NCCL_P2P_DISABLE=1``; "" if the combination is not there."""
    consequence: str
    fix: str
    source: str
    severity: Severity = "warning"
    code: str = "DDP802"


def parse_version(text: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` -> (2, 13, 0): the numbers at the beginning."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def torch_version(facts: Facts) -> str:
    """Version of torch in the ranks, or of the installed package if no rank has reported; "" if there is none."""
    for report in facts.ranks:
        if report.versions:
            return str(report.versions["torch"])
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _uses_nccl(facts: Facts) -> bool:
    """True if the ranks have NVIDIA or AMD devices; if no rank has reported, if this machine has NVIDIA devices."""
    if not facts.ranks:
        return count_accelerators(facts.environ) > 0
    return any(each.versions.get("devices") and each.versions.get("kind", "cuda") == "cuda" for each in facts.ranks)


def _is_detail(facts: Facts) -> bool:
    return facts.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"


def _crashes(facts: Facts) -> bool:
    return not _uses_nccl(facts) and parse_version(torch_version(facts)) >= (2, 13)


def _debug_detail_gloo(facts: Facts) -> str:
    found = f"TORCH_DISTRIBUTED_DEBUG=DETAIL with gloo on torch {torch_version(facts)}"
    return found if _is_detail(facts) and _crashes(facts) else ""


def _debug_detail(facts: Facts) -> str:
    return "TORCH_DISTRIBUTED_DEBUG=DETAIL" if _is_detail(facts) and not _crashes(facts) else ""


def _launch_blocking(facts: Facts) -> str:
    is_set = facts.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
    return "CUDA_LAUNCH_BLOCKING=1 with NCCL" if is_set and _uses_nccl(facts) else ""


def _transport_off(facts: Facts) -> str:
    names = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
    is_off = [name for name in names if facts.environ.get(name, "0") not in ("", "0")]
    return quote(facts.environ, *is_off) if _uses_nccl(facts) else ""


def _old_names(facts: Facts) -> str:
    return quote(facts.environ, "NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_DESYNC_DEBUG")


def _nonblocking(facts: Facts) -> str:
    is_set = facts.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING", "0") not in ("", "0")
    text = torch_version(facts)
    return f"TORCH_NCCL_USE_COMM_NONBLOCKING=1 on torch {text}" if is_set and parse_version(text) < (2, 7, 1) else ""


def _old_kernel(facts: Facts) -> str:  # noqa: ARG001 - every row has the same signature
    release = platform.release()
    return f"Linux {release}" if platform.system() == "Linux" and parse_version(release) < (5, 5) else ""


def _consumer_p2p(facts: Facts) -> str:
    for report in facts.ranks:
        names = [device["name"] for device in report.versions.get("devices", ()) if "RTX 40" in device["name"]]
        driver = report.versions.get("driver") or ""
        if (
            len(names) > 1
            and driver
            and parse_version(driver) < (550, 40, 7)
            and "NCCL_P2P_DISABLE" not in facts.environ
        ):
            return f"{len(names)} x {names[0]} with driver {driver}"
    return ""


COMBINATIONS = (
    Combination(
        applies=_debug_detail_gloo,
        consequence="the constructor of DistributedDataParallel crashes",
        fix="`unset TORCH_DISTRIBUTED_DEBUG`, or set it to INFO",
        source="ddpilot explain DDP606",
        severity="error",
        code="DDP606",
    ),
    Combination(
        applies=_debug_detail,
        consequence="it adds a gloo group and a check to every collective, and can hang between nodes",
        fix="`unset TORCH_DISTRIBUTED_DEBUG`, or set it to INFO",
        source="https://github.com/pytorch/pytorch/issues/129672",
    ),
    Combination(
        applies=_launch_blocking,
        consequence="collectives of NCCL can hang, and every kernel waits for the one before it",
        fix="`unset CUDA_LAUNCH_BLOCKING`; set it only to find the line of a CUDA error, with one rank",
        source="https://github.com/NVIDIA/nccl/issues/750",
    ),
    Combination(
        applies=_transport_off,
        consequence="NCCL does not use its fastest path; NVIDIA lists these settings under debugging only",
        fix="Unset them, unless a fault of this machine needs them",
        source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
    ),
    Combination(
        applies=_old_names,
        consequence="torch has renamed these variables",
        fix="Write TORCH_NCCL_BLOCKING_WAIT, TORCH_NCCL_ASYNC_ERROR_HANDLING, TORCH_NCCL_DESYNC_DEBUG",
        source="https://pytorch.org/docs/stable/torch_nccl_environment_variables.html",
    ),
    Combination(
        applies=_nonblocking,
        consequence="NCCL 2.26 can hang when the group is created",
        fix="`unset TORCH_NCCL_USE_COMM_NONBLOCKING`, or install torch 2.7.1 or newer",
        source="https://github.com/pytorch/pytorch/issues/153960",
        severity="error",
    ),
    Combination(
        applies=_old_kernel,
        consequence="distributed jobs have hung on Linux before 5.5",
        fix="Install a newer kernel; or look at this first if ranks hang without a reason",
        source="https://github.com/huggingface/accelerate/issues/1929",
    ),
    Combination(
        applies=_consumer_p2p,
        consequence="these GPUs report peer-to-peer copies that this driver does not support, and NCCL hangs",
        fix="Install driver 550.40.07 or newer, or `export NCCL_P2P_DISABLE=1`",
        source="https://github.com/NVIDIA/nccl-tests/issues/117",
        severity="error",
        code="DDP108",
    ),
)
