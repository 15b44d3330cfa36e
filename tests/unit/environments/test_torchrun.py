# SPDX-License-Identifier: Apache-2.0
"""torchrun's variables: complete, by hand, and in parts."""

from __future__ import annotations

import pytest

from ddpilot.environments.detect import detect_topology
from ddpilot.errors import TopologyError
from tests.unit.environments.torchrun_variables import COMPLETE


def test_torchrun_is_a_ddpilot_launch_when_its_run_id_is_the_launch() -> None:
    """Both ids the same: the ranks were started by ddpilot."""
    topology = detect_topology({**COMPLETE, "DDPILOT_LAUNCH": "17"})
    assert topology.environment == "ddpilot"
    assert topology.how.startswith("a ddpilot launch set RANK=3")


def test_torchrun_wins_when_it_was_started_inside_a_ddpilot_rank() -> None:
    """The launch id is inherited, the run id is torchrun's own."""
    assert detect_topology({**COMPLETE, "DDPILOT_LAUNCH": "16"}).environment == "torchrun"


def test_torchrun_wins_over_slurm_when_srun_started_it() -> None:
    """srun starts one torchrun per node; its ranks inherit the variables of the node's task."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    topology = detect_topology({**slurm, **COMPLETE})
    assert (topology.environment, topology.rank, topology.world_size) == ("torchrun", 3, 4)


def test_torchrun_with_one_rank_is_a_job() -> None:
    """torchrun --nproc-per-node 1 sets an address, so the program has a group of one rank."""
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    topology = detect_topology({**COMPLETE, **one, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"})
    assert topology.is_distributed
    assert topology.world_size == 1


@pytest.mark.parametrize(
    ("dropped", "expected"),
    [
        (("GROUP_RANK", "GROUP_WORLD_SIZE"), (1, 1, 2, 2)),
        (("GROUP_RANK",), (1, 1, 2, 2)),
    ],
)
def test_torchrun_derives_nodes_when_they_are_even(dropped: tuple[str, ...], expected: tuple[int, ...]) -> None:
    """Nodes with equally many consecutive ranks follow from the sizes."""
    topology = detect_topology({name: value for name, value in COMPLETE.items() if name not in dropped})
    found = (topology.node_rank, topology.local_rank, topology.local_world_size, topology.nnodes)
    assert found == expected


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_torchrun_derives_local_rank_when_the_address_is_this_machine(address: str) -> None:
    """RANK and WORLD_SIZE set by hand, as old tutorials do, with a loopback address: all ranks are here."""
    by_hand = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": address, "MASTER_PORT": "12355"}
    topology = detect_topology(by_hand)
    assert (topology.local_rank, topology.local_world_size, topology.nnodes) == (1, 4, 1)
    assert topology.environment == "torchrun"


def test_torchrun_takes_local_rank_from_slurm_when_both_agree() -> None:
    """RANK=$SLURM_PROCID in a wrapper script, without LOCAL_RANK: Slurm knows it."""
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }
    by_hand = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "12355"}
    topology = detect_topology({**slurm, **by_hand})
    assert (topology.environment, topology.local_rank, topology.master_port) == ("slurm", 1, 12355)
    with pytest.raises(TopologyError, match="RANK=2, but it is 3") as caught:
        detect_topology({**slurm, **by_hand, "RANK": "2"})
    assert caught.value.variable == "RANK"


@pytest.mark.parametrize(
    ("change", "variable"),
    [
        ({"WORLD_SIZE": ""}, "WORLD_SIZE"),
        ({"RANK": "4"}, "RANK"),
        ({"RANK": "-1"}, "RANK"),
        ({"RANK": "one"}, "RANK"),
        ({"RANK": "\u0661"}, "RANK"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "4.0"}, "WORLD_SIZE"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK"),
        ({"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE"),
        ({"GROUP_RANK": "2"}, "GROUP_RANK"),
        ({"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}, "LOCAL_WORLD_SIZE"),
        ({"GROUP_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE"),
        ({"GROUP_WORLD_SIZE": "", "LOCAL_WORLD_SIZE": "3"}, "GROUP_WORLD_SIZE"),
        ({"GROUP_RANK": "", "LOCAL_RANK": "0"}, "GROUP_RANK"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({"MASTER_PORT": ""}, "MASTER_PORT"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT"),
    ],
)
def test_torchrun_names_the_variable_that_is_missing_or_wrong(change: dict[str, str], variable: str) -> None:
    """The error names the variable, shows the value that was found, and ends with what to set."""
    with pytest.raises(TopologyError) as caught:
        detect_topology({**COMPLETE, **change})
    assert caught.value.variable == variable
    assert variable in caught.value.found
    if change.get(variable):
        assert change[variable] in caught.value.found
    assert caught.value.fix


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, "WORLD_SIZE=4"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1"),
    ],
)
def test_torchrun_asks_for_rank_when_other_variables_speak_of_several(environ: dict[str, str], shown: str) -> None:
    """A world size of 4 without RANK does not mean a single process."""
    with pytest.raises(TopologyError, match=f"RANK is not set, while {shown}") as caught:
        detect_topology(environ)
    assert caught.value.variable == "RANK"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0"},
        {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "", "WORLD_SIZE": " "},
    ],
)
def test_torchrun_is_alone_when_nothing_speaks_of_several_ranks(environ: dict[str, str]) -> None:
    """Left-over variables of a single process start no job."""
    topology = detect_topology(environ)
    assert topology.environment == "alone"
    assert (topology.rank, topology.world_size, topology.master_addr) == (0, 1, None)
