# SPDX-License-Identifier: Apache-2.0
"""Slurm's variables: tasks of srun, and shells that only look like tasks."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpilot.environments.detect import detect_topology
from ddpilot.environments.slurm import parse_node_list, parse_tasks_per_node
from ddpilot.environments.variables import derive_port
from ddpilot.errors import TopologyError

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gra[003-005,9]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}


def test_slurm_task_reads_uneven_nodes_and_the_first_host() -> None:
    """The third node has 2 of the 7 tasks; the first host is the address, the port comes from job and step."""
    topology = detect_topology(TASK)
    assert (topology.rank, topology.world_size, topology.local_rank, topology.local_world_size) == (5, 7, 1, 2)
    assert (topology.node_rank, topology.nnodes) == (2, 4)
    assert (topology.master_addr, topology.master_port) == ("gra003", 15_000 + 4711 + 202)
    assert "SLURM_STEP_NODELIST=gra[003-005,9]" in topology.how


def test_slurm_step_wins_over_the_job() -> None:
    """srun on a part of the allocation: the job's own list, count and tasks do not count."""
    job = {"SLURM_JOB_NODELIST": "gra[001-009]", "SLURM_NTASKS": "99", "SLURM_TASKS_PER_NODE": "11(x9)"}
    topology = detect_topology({**TASK, **job})
    assert (topology.world_size, topology.nnodes, topology.master_addr) == (7, 4, "gra003")


def test_slurm_falls_back_to_the_job_when_the_step_says_nothing() -> None:
    """With the few variables of an old or trimmed environment, even nodes follow from the counts."""
    few = {"SLURM_JOBID": "31", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_NODEID": "1"}
    topology = detect_topology({**few, "SLURM_STEPID": "0", "SLURM_NODELIST": "a1,a2"})
    assert (topology.local_world_size, topology.nnodes, topology.master_addr) == (2, 2, "a1")
    assert topology.master_port == 15_031


def test_slurm_address_and_port_of_the_user_win() -> None:
    """MASTER_ADDR and MASTER_PORT are used independently, and `how` names them."""
    both = detect_topology({**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29999"})
    assert (both.master_addr, both.master_port) == ("10.0.0.1", 29999)
    assert "MASTER_ADDR=10.0.0.1; MASTER_PORT=29999" in both.how
    assert detect_topology({**TASK, "MASTER_PORT": "29999"}).master_addr == "gra003"


def test_slurm_agrees_with_a_world_size_of_the_user() -> None:
    """WORLD_SIZE exported in a batch script is checked against the step, not ignored."""
    assert detect_topology({**TASK, "WORLD_SIZE": "7"}).world_size == 7
    with pytest.raises(TopologyError, match="WORLD_SIZE=8, but it is 7") as caught:
        detect_topology({**TASK, "WORLD_SIZE": "8"})
    assert caught.value.variable == "WORLD_SIZE"


@pytest.mark.parametrize("step", ["4294967291", "batch", "4294967290", "interactive", "4294967292", "extern", ""])
def test_slurm_shell_is_alone_whatever_the_job_has(step: str) -> None:
    """A batch script, an interactive shell and a shell by ssh carry the job's counts and are one process."""
    shell = {**TASK, "SLURM_STEP_ID": step, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    topology = detect_topology(shell)
    assert (topology.environment, topology.world_size) == ("alone", 1)
    assert "srun" in topology.how


def test_slurm_step_of_one_task_is_alone() -> None:
    """srun of one task starts no job that waits for others."""
    topology = detect_topology({**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
    assert topology.environment == "alone"
    assert "SLURM_STEP_NUM_TASKS=1" in topology.how


@pytest.mark.parametrize(
    ("change", "variable"),
    [
        ({"SLURM_PROCID": ""}, "SLURM_PROCID"),
        ({"SLURM_PROCID": "7"}, "SLURM_PROCID"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID"),
        ({"SLURM_NTASKS": "", "SLURM_STEP_NUM_TASKS": ""}, "SLURM_NTASKS"),
        ({"SLURM_LOCALID": ""}, "SLURM_LOCALID"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID"),
        ({"SLURM_NODEID": ""}, "SLURM_NODEID"),
        ({"SLURM_NODEID": "4"}, "SLURM_NODEID"),
        ({"SLURM_STEP_NODELIST": "gra[003"}, "SLURM_STEP_NODELIST"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NUM_NODES"),
        ({"SLURM_STEP_NODELIST": "", "SLURM_STEP_NUM_NODES": "4"}, "SLURM_STEP_NODELIST"),
        ({"SLURM_STEP_NUM_NODES": "5"}, "SLURM_STEP_NODELIST"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID"),
    ],
)
def test_slurm_names_the_variable_that_is_missing_or_wrong(change: dict[str, str], variable: str) -> None:
    """Related variables are checked together; the error names one, with the values and the fix."""
    with pytest.raises(TopologyError) as caught:
        detect_topology({**TASK, **change})
    assert caught.value.variable == variable
    assert variable in caught.value.found
    assert caught.value.fix


def test_derive_port_stays_in_its_range_and_tells_jobs_and_steps_apart() -> None:
    """Neighbouring jobs and steps differ, also job ids that are no numbers; all ports lie in 15000 .. 24999."""
    ports = [derive_port(str(job), step) for job in range(100, 150) for step in range(2)]
    assert len(set(ports)) == len(ports)
    assert derive_port("prterun-a-1@1") != derive_port("prterun-a-1@2")
    many = [derive_port(job, step) for job in ("0", "99999999", "a", "") for step in (0, 1, 4_000_000_000)]
    assert all(15_000 <= port < 25_000 for port in ports + many)


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
    """Some sites append a suffix for a different network."""
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
    """No input gives a different exception, an empty name or a bracket in a name."""
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
