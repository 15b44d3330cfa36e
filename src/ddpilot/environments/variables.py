# SPDX-License-Identifier: Apache-2.0
"""Read variables from a mapping; errors name the variable, its value and what to set."""

from __future__ import annotations

import ipaddress
import zlib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from ddpilot.errors import TopologyError

PORT_BASE = 15_000
PORT_COUNT = 10_000

Environ = Mapping[str, str]
_T = TypeVar("_T")


def read_text(environ: Environ, *names: str) -> str | None:
    """Value of the first of `names` that is not empty, without surrounding whitespace; None if all are empty."""
    for name in names:
        if value := environ.get(name, "").strip():
            return value
    return None


_SWITCH = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}


def read_switch(environ: Environ, name: str, fix: str = "Set it to 1 or 0, or unset it") -> bool | None:
    """Value of the switch `name`: True for 1, true, yes or on, False for 0, false, no or off, None if it is not set.

    Raises `TopologyError`, naming the variable, for any other value.
    """
    word = environ.get(name, "").strip()
    if word and word.lower() not in _SWITCH:
        raise TopologyError(f"reading {name}", variable=name, found=f"{name}={word!r}", fix=fix)
    return _SWITCH[word.lower()] if word else None


def read_int(environ: Environ, *names: str, minimum: int = 0) -> int | None:
    """Value of the first of `names` that is set, as an integer of at least `minimum`; None if none is set.

    Raises `TopologyError`, naming the variable, for any other value.
    """
    name = first_set(environ, *names)
    if name is None:
        return None
    text = environ[name].strip()
    if not text.isascii() or not text.isdigit() or int(text) < minimum:
        raise TopologyError(
            f"reading {name}",
            variable=name,
            found=f"{name}={environ[name]!r}",
            fix=f"Set {name} to a whole number of at least {minimum}, or unset it",
        )
    return int(text)


def first_set(environ: Environ, *names: str) -> str | None:
    """The first of `names` whose value is not empty; None if there is none."""
    return next((name for name in names if environ.get(name, "").strip()), None)


def require_int(environ: Environ, did: str, *names: str, fix: str, minimum: int = 0) -> int:
    """Like `read_int`, but raises `TopologyError`, naming the first of `names` and with `fix`, if none is set."""
    return or_raise(read_int(environ, *names, minimum=minimum), missing(environ, did, names[0], fix=fix))


def missing(environ: Environ, did: str, variable: str, *, fix: str, related: Iterable[str] = ()) -> TopologyError:
    """The error for a variable that is not set. `related`: related variables, shown if they are set."""
    others = quote(environ, *related)
    return TopologyError(
        did, variable=variable, found=f"{variable} is not set" + (f", while {others}" if others else ""), fix=fix
    )


def or_raise(value: _T | None, error: Exception) -> _T:
    """Return `value`, or raise `error` if it is None."""
    if value is None:
        raise error
    return value


def require_below(environ: Environ, did: str, smaller: str, larger: str) -> None:
    """Raise `TopologyError` unless the number in variable `smaller` is below that in `larger`. Both must be set."""
    if int(environ[smaller]) >= int(environ[larger]):
        raise TopologyError(
            did,
            variable=smaller,
            found=quote(environ, smaller, larger),
            fix=f"{smaller} counts from 0 and must stay below {larger}: correct one of them, or unset both",
        )


def check_nodes(
    did: str, found: str, variables: tuple[str, str], *, world_size: int, local_world_size: int, node: tuple[int, int]
) -> None:
    """Raise `TopologyError` unless `node` (node_rank, nnodes) is consistent with these sizes.

    `found`: the values for the message; `variables`: the variables of node_rank and local_world_size.
    """
    (node_rank, nnodes), elsewhere = node, world_size - local_world_size
    if node_rank >= nnodes:
        fix = f"Correct {variables[0]}: with {nnodes} machine(s) it is at most {nnodes - 1}"
        raise TopologyError(did, variable=variables[0], found=found, fix=fix)
    if elsewhere < nnodes - 1 or (nnodes == 1 and elsewhere):
        fix = f"Correct the wrong one: {nnodes} machine(s) with at least one rank each hold {world_size} rank(s)"
        raise TopologyError(did, variable=variables[1], found=found, fix=fix)


def quote(environ: Environ, *names: str) -> str:
    """``RANK=1, WORLD_SIZE=4`` for the `names` that are set."""
    return ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name, "").strip())


def read_master(environ: Environ) -> tuple[str | None, int | None]:
    """`MASTER_ADDR` and `MASTER_PORT` as set by the user or the launcher; None for each that is not set."""
    port = read_int(environ, "MASTER_PORT", minimum=1)
    if port is not None and port > 65_535:
        found, fix = f"MASTER_PORT={port}", "Set MASTER_PORT to 1 .. 65535"
        raise TopologyError("reading MASTER_PORT", variable="MASTER_PORT", found=found, fix=fix)
    return read_text(environ, "MASTER_ADDR"), port


def is_loopback(host: str) -> bool:
    """True if `host` is this machine's loopback, by name or by address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def derive_port(job: str, step: int = 0) -> int:
    """Derive the same port on every rank of a job: ``15000 + (number + 101 * step) % 10000``.

    `number` is the job id if it is an integer, else its CRC-32. The range 15000 .. 24999 avoids well-known ports,
    torch's default 29500 and Linux's ephemeral ports from 32768 on. Jobs with adjacent ids get adjacent ports, so they
    do not collide on a shared node.
    """
    number = int(job) if job.isascii() and job.isdigit() else zlib.crc32(job.encode())
    return PORT_BASE + (number + 101 * step) % PORT_COUNT
