# SPDX-License-Identifier: Apache-2.0
"""Node lists and task counts, against what Slurm itself prints."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpilot.environments.slurm_lists import parse_node_list, parse_tasks_per_node
from ddpilot.errors import TopologyError

# The right-hand sides are what `scontrol show hostnames` of Slurm 22.05 prints.
EXPANDED = {
    "gra[003-005,9],b1": "gra003 gra004 gra005 gra9 b1",
    "a1,a2": "a1 a2",
    "a1": "a1",
    "r[1-2]n[3-4]": "r1n3 r1n4 r2n3 r2n4",
    "r[1-2][3-4]": "r13 r14 r23 r24",
    "a1,b[1-2]c[3,5-6],d": "a1 b1c3 b1c5 b1c6 b2c3 b2c5 b2c6 d",
    "n[8-11]": "n8 n9 n10 n11",
    "n[08-11]": "n08 n09 n10 n11",
    "n[001-3]": "n001 n002 n003",
    "n[9-010]": "n9 n10",
    "n[2,1]": "n2 n1",
    "x[1-2],x[1-2]": "x1 x2 x1 x2",
}


@pytest.mark.parametrize(("text", "hosts"), EXPANDED.items())
def test_parse_node_list_expands_as_slurm_does(text: str, hosts: str) -> None:
    """Same hosts, same order, same zeros as Slurm's own expansion."""
    assert parse_node_list(text) == tuple(hosts.split())


def test_parse_node_list_takes_text_after_a_bracket() -> None:
    """Some sites append a suffix for another network."""
    assert parse_node_list("n[1-2]-ib") == ("n1-ib", "n2-ib")


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", ",", "a,", "a,,b", "n[1", "n1]", "n[1-[2]]", "n[]", "n[,1]", "n[5-3]", "n[a-b]", "n[1-2-3]"),
        *("n[0-99999999]", "n[0-999]m[0-999]k[0-999]p[0-999]", "n[0-65535],m[0-65535]", "n]1[", "n[\u0661]"),
    ],
)
def test_parse_node_list_refuses_what_is_no_list(text: str) -> None:
    """The error names the variable and shows its value; no list is expanded into millions of names first."""
    with pytest.raises(TopologyError) as caught:
        parse_node_list(text, variable="SLURM_STEP_NODELIST")
    assert caught.value.variable == "SLURM_STEP_NODELIST"
    assert repr(text) in caught.value.found


def compress(hosts: list[tuple[str, str]]) -> str:
    """(prefix, digits) pairs as Slurm would write them: neighbours of one prefix and width share a bracket."""
    written = []
    for (prefix, width), group in groupby(hosts, key=lambda host: (host[0], len(host[1]))):
        numbers = [int(digits) for _, digits in group]
        runs: list[list[int]] = []
        for number in numbers:
            if runs and runs[-1][-1] == number - 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        parts = [f"{run[0]:0{width}d}" + (f"-{run[-1]:0{width}d}" if len(run) > 1 else "") for run in runs]
        written.append(f"{prefix}[{','.join(parts)}]")
    return ",".join(written)


# (prefix, first number, how many in a row, width)
BLOCK = st.tuples(
    st.sampled_from(["n", "gpu", "a-b"]), st.integers(0, 1100), st.integers(1, 8), st.sampled_from([1, 3, 5])
).map(lambda block: [(block[0], f"{n:0{block[3]}d}") for n in range(block[1], block[1] + block[2])])


@settings(derandomize=True, deadline=None, database=None)
@given(st.lists(BLOCK, min_size=1, max_size=5))
def test_parse_node_list_is_the_inverse_of_compressing(blocks: list[list[tuple[str, str]]]) -> None:
    """Any hosts, compressed into brackets, come back as they were, in their order."""
    hosts = [host for block in blocks for host in block]
    assert parse_node_list(compress(hosts)) == tuple(prefix + digits for prefix, digits in hosts)


@settings(derandomize=True, deadline=None, database=None)
@given(st.text(alphabet="ab01[]-, ", max_size=12))
def test_parse_node_list_answers_or_refuses_whatever_it_is_given(text: str) -> None:
    """No input gives another exception, an empty name or a bracket in a name."""
    try:
        hosts = parse_node_list(text)
    except TopologyError:
        return
    assert hosts
    assert all(host and "[" not in host and "]" not in host for host in hosts)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2(x3),1", (2, 2, 2, 1)), ("4", (4,)), ("1,2,1", (1, 2, 1)), ("2(x2),1(x2)", (2, 2, 1, 1)), ("3(x1)", (3,))],
)
def test_parse_tasks_per_node_unfolds_repeats(text: str, counts: tuple[int, ...]) -> None:
    """One number per node, in node order."""
    assert parse_tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "2(x)", "2x3", "(x3)", "0", "2(x0)", "2,", "-1", "2(x99999999)", "two"])
def test_parse_tasks_per_node_refuses_what_is_no_count(text: str) -> None:
    """The error names the variable and shows its value."""
    with pytest.raises(TopologyError) as caught:
        parse_tasks_per_node(text, variable="SLURM_STEP_TASKS_PER_NODE")
    assert caught.value.variable == "SLURM_STEP_TASKS_PER_NODE"
    assert repr(text) in caught.value.found
