# SPDX-License-Identifier: Apache-2.0
"""Compare what all nodes of a job need to have in common: the addresses of their names, the MTU, and the code."""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from ddpilot.diagnose.facts import Answers, RankReport
from ddpilot.environments.variables import is_loopback
from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks

_MAX_AT_ONCE = 32
_MAX_FILES = 2000
_MAX_NAMED = 5
_PACKAGE = Path(__file__).resolve().parents[1]


def resolve_names(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the addresses of each host name on this machine; none for a name that does not resolve."""
    unique = list(dict.fromkeys(names))
    with ThreadPoolExecutor(_MAX_AT_ONCE) as pool:
        return dict(zip(unique, pool.map(_addresses, unique), strict=True))


def _addresses(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(each[4][0]) for each in found})


def check_names(hosts: Mapping[int, str], tables: Mapping[int, Mapping[str, Sequence[str]]]) -> Answers:
    """Compare how the nodes resolve each other's names. `hosts`: name by node; `tables`: `resolve_names` by node.

    A node's own name may be a loopback address there, as Debian installs it.
    """
    is_different, unknown = False, []
    for node, name in hosts.items():
        if list(hosts.values()).count(name) > 1:  # several nodes of one machine
            continue
        found: dict[tuple[str, ...], list[int]] = {}
        for other, table in tables.items():
            addresses = tuple(table.get(name, ()))
            if other != node or (addresses and not any(map(is_loopback, addresses))):
                found.setdefault(addresses, []).append(other)
        if len(found) > 1:
            is_different = True
            yield _different_name(name, hosts, found)
        elif () in found:
            unknown.append(name)
    if unknown:
        yield f"{', '.join(unknown[:_MAX_NAMED])} resolve on no other node: ranks can only be reached by address"
    elif not is_different:
        yield f"the names of {len(hosts)} nodes resolve to the same addresses on all of them"


def _different_name(name: str, hosts: Mapping[int, str], found: Mapping[tuple[str, ...], Sequence[int]]) -> Finding:
    most = max(found, key=lambda addresses: (bool(addresses), len(found[addresses])))
    texts = [
        f"{', '.join(addresses) or 'does not resolve'} on {_names(hosts, nodes)}" for addresses, nodes in found.items()
    ]
    wrong = [node for addresses, nodes in found.items() if addresses != most for node in nodes]
    fix = f"Correct {name} in /etc/hosts, or in the name service, of {_names(hosts, wrong)}: `{' '.join(most)} {name}`"
    return make_finding("DDP809", summary=f"{name} is {'; '.join(texts)}", fix=fix)


def _names(hosts: Mapping[int, str], nodes: Sequence[int]) -> str:
    shown = [f"node {node} ({hosts[node]})" for node in nodes[:_MAX_NAMED]]
    more = f" and {len(nodes) - _MAX_NAMED} more" if len(nodes) > _MAX_NAMED else ""
    return f"{', '.join(shown)}{more}"


def read_mtu(interface: str | None) -> int | None:
    """Return the largest packet that an interface of this machine sends, in bytes; None if it is unknown."""
    found = psutil.net_if_stats().get(interface or "")
    return found.mtu if found is not None else None


def check_mtu(hosts: Mapping[int, str], mtus: Mapping[int, tuple[str, int | None]]) -> Answers:
    """Compare the MTU of the interfaces between the nodes. `mtus`: (interface, MTU) by node."""
    found: dict[int, list[int]] = {}
    for node, (_, mtu) in mtus.items():
        if mtu is not None:
            found.setdefault(mtu, []).append(node)
    if len(found) > 1:
        usual = max(found, key=lambda mtu: len(found[mtu]))
        texts = [f"{mtu} on {_names(hosts, nodes)}" for mtu, nodes in found.items()]
        node = next(node for mtu, nodes in found.items() if mtu != usual for node in nodes)
        fix = f"On {hosts[node]}: `ip link set {mtus[node][0]} mtu {usual}`"
        yield make_finding(
            "DDP810", summary=f"the MTU of the interface between the nodes is {'; '.join(texts)}", fix=fix
        )
    elif found:
        yield f"the interfaces between the nodes all have an MTU of {next(iter(found))} bytes"


def hash_code(folder: Path, script: Path | None = None) -> dict[str, str]:
    """Return a hash of each Python file below `folder`, by its path from there, and of `script`.

    Hidden folders and virtual environments are left out; at most 2000 files in 2000 folders.
    """
    paths = [] if script is None else [script]
    paths += [path for path in itertools.islice(_python_files(folder), _MAX_FILES) if path != script]
    found = {}
    for path in paths:
        name = str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
        try:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
        except OSError as error:
            found[name] = error.strerror or "unreadable"
    return found


def _python_files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in itertools.islice(os.walk(folder), _MAX_FILES):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith((".", "__")) and not os.path.exists(os.path.join(parent, name, "pyvenv.cfg"))
        )
        yield from (Path(parent, name) for name in sorted(names) if name.endswith(".py"))


def hash_package() -> str:
    """Return one hash of all files of this ddpilot, which may be an edited checkout."""
    files = hash_code(_PACKAGE)
    return hashlib.sha256("".join(f"{name}{files[name]}" for name in sorted(files)).encode()).hexdigest()[:8]


def check_code(ranks: Sequence[RankReport]) -> Answers:
    """Compare the hashes of the script and the Python files next to it, as the ranks have read them."""
    reports = [report for report in ranks if report.code]
    if not reports:
        return
    names = dict.fromkeys(name for report in reports for name in report.code)
    differing = [name for name in names if len({report.code.get(name) for report in reports}) > 1]
    script = next(iter(reports[0].code))
    if not differing:
        yield f"{script} ({reports[0].code[script]}) and {len(names) - 1} other Python files are the same on all ranks"
        return
    evidence = []
    for name in differing[:_MAX_NAMED]:
        found: dict[str, list[int]] = {}
        for report in reports:
            found.setdefault(report.code.get(name) or "missing", []).append(report.rank)
        evidence.append(f"{name}: {'; '.join(f'{value} on {render_ranks(which)}' for value, which in found.items())}")
    more = f" and {len(differing) - _MAX_NAMED} more" if len(differing) > _MAX_NAMED else ""
    hosts = sorted({report.host for report in reports})
    summary = f"{', '.join(differing[:_MAX_NAMED])}{more} of {len(names)} Python files differ between the nodes"
    fix = f"Copy the same files to {', '.join(hosts[:_MAX_NAMED])}, or start the job in a folder that all nodes share"
    yield make_finding("DDP811", summary=summary, evidence=evidence, fix=fix)
