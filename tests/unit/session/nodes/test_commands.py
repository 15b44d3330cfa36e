# SPDX-License-Identifier: Apache-2.0
"""Commands that start host processes."""

from __future__ import annotations

import json

import pytest

from ddpilot.session.nodes import commands
from ddpilot.session.nodes.slurm import SlurmRequest


def test_no_command_line_has_the_key() -> None:
    """It is in the first line of standard input."""
    line = commands.first_line(
        node_rank=None, num_nodes=2, directory="/work", port=4711, certificate="PEM", keys=["aa", "bb"]
    )
    given = json.loads(line)
    assert given["keys"] == ["aa", "bb"]
    assert given["addresses"][-1] == "127.0.0.1"
    words = [*commands.srun_command(2, ["--jobid=7"]), *commands.ssh_command("a")]
    assert not any("PEM" in word or "4711" in word for word in words)


def test_ssh_gets_one_word_for_the_remote_shell_and_no_option_from_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`DDPILOT_SSH` names another ssh, with options."""
    monkeypatch.setenv("DDPILOT_SSH", "myssh -F 'my config'")
    *words, dashes, host, remote = commands.ssh_command("a")
    assert words[:3] == ["myssh", "-F", "my config"]
    assert "BatchMode=yes" in words
    assert (dashes, host) == ("--", "a")
    assert remote.startswith("exec ")


def test_srun_starts_one_task_per_node() -> None:
    """As a step that shares the job's resources and outlives the failure of a node."""
    words = commands.srun_command(3, ["--jobid=7"])
    assert words[:2] == ["srun", "--jobid=7"]
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--overlap", "--no-kill"} <= {*words}


def test_slurm_options_become_words() -> None:
    """Those without a value too."""
    request = SlurmRequest(gpus_per_node=4, options={"time": "10", "exclusive": ""})
    assert request.words() == ["--gpus-per-node=4", "--time=10", "--exclusive"]
