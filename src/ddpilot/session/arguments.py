# SPDX-License-Identifier: Apache-2.0
"""Checks that `Session` makes before anything runs: arguments and installed packages. Each raises LaunchError."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from keyword import iskeyword
from typing import Any

from ddpilot.errors import LaunchError
from ddpilot.module_names import SESSION_KERNEL

_SHELL_NAMES = ("get_ipython", "display", "In", "Out", "exit", "quit")

OWN_NAMES = ("rank", "world_size", "device", "group")
"""Names that a session sets on every rank."""


def check_ranks(ranks: object, world_size: int, did: str) -> tuple[int, ...]:
    """Return the ranks in `ranks`, sorted and without duplicates. Raises if it is empty or a rank is out of range."""
    fix = "Give numbers of ranks, such as [0]"
    if isinstance(ranks, (int, str)):
        raise LaunchError(did, found=f"`ranks={ranks!r}`", fix=fix)
    try:
        asked = list(ranks)  # type: ignore[call-overload]  # raises TypeError
    except TypeError as error:
        raise LaunchError(did, found=f"`ranks={ranks!r}`", fix=fix) from error
    if not asked:
        raise LaunchError(did, found="no ranks", fix=fix)
    for rank in asked:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank not in range(world_size):
            raise LaunchError(did, found=f"rank {rank!r}, and the ranks are 0 to {world_size - 1}", fix=fix)
    return tuple(sorted(set(asked)))


def read_hosts(hosts: Any) -> tuple[str, ...]:
    """Return `hosts` as a tuple, () for None. A string is left to `SessionOptions`, which rejects it."""
    if hosts is None or isinstance(hosts, str):
        return hosts or ()  # type: ignore[return-value]
    if not (found := tuple(hosts)):
        raise LaunchError(
            "reading `hosts`", found="no host", fix="Name at least one, or leave `hosts` out for ranks on this machine"
        )
    return found


def check_code(code: object) -> str:
    """Return `code` if it is a string."""
    if not isinstance(code, str):
        raise LaunchError(
            "running a cell",
            found=f"{code!r} of type {type(code).__name__}",
            fix="Give its code as text; `run` calls a function",
        )
    return code


def check_expression(expression: object) -> str:
    """Return `expression` without surrounding whitespace if it is a string that parses as a Python expression."""
    fix = "Give the name of a variable or an expression, as text"
    if not isinstance(expression, str):
        raise LaunchError("pulling", found=f"{expression!r} of type {type(expression).__name__}", fix=fix)
    try:
        ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise LaunchError(
            f"pulling `{expression}`", found=f"that is not a Python expression: {error.msg}", fix=fix
        ) from error
    return expression.strip()


def check_values(values: object) -> Mapping[str, object]:
    """Return `values` if it maps names of variables to values and contains none of the session's or IPython's names."""
    if not isinstance(values, Mapping):
        raise LaunchError(
            "pushing", found=f"{values!r:.100} of type {type(values).__name__}", fix='Give {"name": value}'
        )
    odd = [name for name in values if not (isinstance(name, str) and name.isidentifier() and not iskeyword(name))]
    if odd:
        raise LaunchError("pushing", found=f"{odd[0]!r} is not a variable name", fix='Give {"name": value}')
    shells = next((name for name in values if name in _SHELL_NAMES), None)
    if shells is not None:
        found = f"`{shells}` belongs to IPython, and every rank has its own"
        raise LaunchError("pushing", found=found, fix="Leave it out")
    own = next((name for name in values if name in OWN_NAMES), None)
    if own is not None:
        raise LaunchError(
            "pushing",
            found=f"`{own}` is set by the session on every rank, where cells and `restart` rely on it",
            fix="Give the value a different name, or set it in a cell on the ranks",
        )
    return values


def refuse_in_a_rank() -> None:
    """Raise if this process is a rank of a session."""
    kernels = sys.modules.get(SESSION_KERNEL)  # also loaded in processes that ranks are forked from
    if kernels is not None and kernels.RankKernel.initialized():
        raise LaunchError(
            "starting a session",
            found="this code already runs on a rank of a session",
            fix="Collectives and DDP work here as they are; start ranks in the notebook (`%%ddp --local`)",
        )


def check_gpus(gpus: tuple[int, ...], num_gpus: int) -> None:
    """Raise if an index in `gpus` is not below `num_gpus`, the number of GPUs of this machine."""
    wrong = [gpu for gpu in gpus if gpu >= num_gpus]
    if wrong:
        visible = {0: "no GPU is visible here", 1: "one GPU is visible here, number 0"}
        visible_here = visible.get(num_gpus, f"{num_gpus} GPUs are visible here, 0 to {num_gpus - 1}")
        raise LaunchError(
            "reading `gpus`",
            found=f"number {wrong[0]}, and {visible_here}",
            fix="Check `nvidia-smi`, or leave `gpus` out" + ("" if num_gpus else ": the ranks then run on the CPU"),
        )


def check_installed() -> None:
    """Raise LaunchError if a package that kernels need is not installed."""
    missing = []
    for name in ("zmq", "jupyter_client", "ipykernel"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise LaunchError(
            "starting a session",
            found=f"{', '.join(missing)} cannot be imported",
            fix='Install them: pip install "ddpilot[notebook]"',
        )
