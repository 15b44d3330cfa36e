# SPDX-License-Identifier: Apache-2.0
"""Parse Slurm's compact notations: node lists such as ``gra[003-005,9],b1`` and task counts such as ``2(x3),1``."""

from __future__ import annotations

import re
from itertools import product

from ddpilot.errors import TopologyError

MAX_NODES = 65_536
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def parse_node_list(text: str, *, variable: str = "SLURM_JOB_NODELIST") -> tuple[str, ...]:
    """The host names in `text`, in Slurm's order (first bracket slowest), at most 65,536.

    Numbers keep the zero padding of their range's low end; several brackets in one name multiply. Raises
    `TopologyError` naming `variable` for an empty list, an empty name, an invalid bracket or a descending range.
    """
    hosts: list[str] = []
    for item in _split_outside_brackets(text.strip(), variable):
        # Pieces at odd indices are the contents of brackets.
        pieces = re.split(r"[\[\]]", item)
        choices = [_expand_ranges(piece, text, variable) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        names = ["".join(parts) for parts in _bounded_product(choices, text, variable)]
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
                found=f"{variable}={text!r}, where {item!r} is no task count",
                fix=f"Slurm writes it like 2(x3),1: leave {variable} as srun set it, or unset it",
            )
        counts += [int(match[1])] * repeats
    return tuple(counts)


def _split_outside_brackets(text: str, variable: str) -> list[str]:
    items, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _refuse(text, variable, "brackets that do not pair")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    if depth:
        raise _refuse(text, variable, "a bracket that is not closed")
    return items


def _expand_ranges(ranges: str, text: str, variable: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        low, high = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(low) > int(high):
            raise _refuse(text, variable, f"{item!r} in brackets, which is no number and no rising range")
        if int(high) - int(low) >= MAX_NODES:
            raise _refuse(text, variable, f"more than {MAX_NODES} hosts")
        numbers += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
    return numbers


def _bounded_product(choices: list[list[str]], text: str, variable: str) -> product[tuple[str, ...]]:
    total = 1
    for choice in choices:
        total *= len(choice)
    if total > MAX_NODES:
        raise _refuse(text, variable, f"more than {MAX_NODES} hosts")
    return product(*choices)


def _refuse(text: str, variable: str, why: str) -> TopologyError:
    return TopologyError(
        f"expanding the node list in {variable}",
        variable=variable,
        found=f"{variable}={text!r} has {why}",
        fix=f"Slurm writes it like gra[003-005,9],b1: leave {variable} as Slurm set it, or correct it",
    )
