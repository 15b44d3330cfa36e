# SPDX-License-Identifier: Apache-2.0
"""Which launcher is believed, and what `distributed` and DDPILOT_DISTRIBUTED change."""

from __future__ import annotations

import os
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpilot.environments.detect import detect_topology, parse_switch
from ddpilot.environments.topology import Topology
from ddpilot.errors import TopologyError

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
)
VALUES = ("0", "1", "2", "4", "", "x", "n[1-2]")


def test_detect_topology_reads_nothing_but_the_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's own environment does not matter, and a read-only mapping is enough."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("DDPILOT_DISTRIBUTED", "maybe")
    before = dict(os.environ)
    assert detect_topology(MappingProxyType({})).environment == "alone"
    assert dict(os.environ) == before


@pytest.mark.parametrize("word", ["0", "false", "No", " OFF "])
def test_detect_topology_stays_alone_when_told_so(word: str) -> None:
    """The variable and the argument both keep a rank alone, also where other variables are broken."""
    broken = {**TORCHRUN, "RANK": "seven"}
    assert detect_topology({**broken, "DDPILOT_DISTRIBUTED": word}).how == f"Alone because DDPILOT_DISTRIBUTED={word}"
    assert detect_topology(broken, distributed=False).how == "Alone because distributed=False"


@pytest.mark.parametrize("word", ["", "auto", "AUTO"])
def test_detect_topology_detects_when_left_to_it(word: str) -> None:
    """auto is the same as nothing."""
    assert detect_topology({**TORCHRUN, "DDPILOT_DISTRIBUTED": word}).environment == "torchrun"
    assert detect_topology({"DDPILOT_DISTRIBUTED": word}).environment == "alone"


@pytest.mark.parametrize("word", ["1", "true", "YES", "on"])
def test_detect_topology_refuses_to_be_alone_when_told_so(word: str) -> None:
    """True without a launcher's variables raises an error that quotes the setting."""
    with pytest.raises(TopologyError, match=f"DDPILOT_DISTRIBUTED={word} asks for several ranks") as caught:
        detect_topology({"DDPILOT_DISTRIBUTED": word})
    assert caught.value.variable == "DDPILOT_DISTRIBUTED"
    assert detect_topology({**TORCHRUN, "DDPILOT_DISTRIBUTED": word}).rank == 1
    with pytest.raises(TopologyError, match="distributed=True asks for several ranks"):
        detect_topology({}, distributed=True)


def test_detect_topology_says_why_it_would_be_alone_when_that_is_refused() -> None:
    """In a batch script the error for distributed=True carries the hint at srun."""
    script = {"SLURM_JOB_ID": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    with pytest.raises(TopologyError, match="srun python"):
        detect_topology(script, distributed=True)


def test_detect_topology_argument_beats_the_variable() -> None:
    """Also for an invalid value."""
    assert detect_topology({**TORCHRUN, "DDPILOT_DISTRIBUTED": "0"}, distributed=True).rank == 1
    assert not detect_topology({**TORCHRUN, "DDPILOT_DISTRIBUTED": "1"}, distributed=False).is_distributed
    assert detect_topology({**TORCHRUN, "DDPILOT_DISTRIBUTED": "maybe"}, distributed=True).rank == 1


def test_parse_switch_refuses_other_words() -> None:
    """The error names the variable, the value and the words that work."""
    with pytest.raises(TopologyError, match=r"DDPILOT_DISTRIBUTED='maybe'.*auto") as caught:
        parse_switch("maybe")
    assert caught.value.variable == "DDPILOT_DISTRIBUTED"


@settings(derandomize=True, deadline=None, database=None)
@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES)))
def test_detect_topology_answers_or_names_a_variable_whatever_is_set(environ: dict[str, str]) -> None:
    """Any mixture gives a valid topology or an error with variable, finding and fix, never a different exception."""
    try:
        answer: Topology | TopologyError = detect_topology(environ)
    except TopologyError as error:
        answer = error
    if isinstance(answer, TopologyError):
        assert answer.variable.isupper()
        assert answer.found
        assert answer.fix
    else:
        assert answer.how
