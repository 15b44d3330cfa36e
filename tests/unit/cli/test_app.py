# SPDX-License-Identifier: Apache-2.0
"""The command as a user runs it, in a process of its own, and its verbs through typer's runner."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddpilot.cli.app import app, render_error
from ddpilot.errors import DdpilotError, TopologyError

COMMAND = Path(sys.executable).with_name("ddpilot")
LAUNCHER_PREFIXES = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "DDPILOT_DISTRIBUTED", "DDPILOT_LAUNCH"),
    *("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "MVP_", "PALS_"),
)
RANK_ONE = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def run(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The installed command with nothing of a launcher in its environment but `environ`."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    full = {**ours, "COLUMNS": "80", **(environ or {})}
    return subprocess.run([str(COMMAND), *arguments], env=full, capture_output=True, text=True, timeout=30)


def test_command_prints_help_and_version() -> None:
    """Help lists every verb with its whole line; the version is the installed one."""
    helped = run("--help")
    assert helped.returncode == 0
    assert re.search("topology +Print the rank and the job of this process[.]", helped.stdout)
    assert re.search("demo +Run the quickstart notebook on two ranks[.]", helped.stdout)
    from importlib.metadata import version

    assert run("--version").stdout == f"ddpilot {version('ddpilot')}\n"


def test_python_m_ddpilot_is_the_command() -> None:
    """Like `python -m torch.distributed.run`: with this interpreter, whatever PATH is."""
    argv = [sys.executable, "-m", "ddpilot", "--version"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == run("--version").stdout


def test_command_shows_help_when_it_gets_no_verb() -> None:
    """A bare `ddpilot` is a question, answered on the terminal with the status of a usage error."""
    bare = run()
    assert bare.returncode == 2
    assert "Usage: ddpilot" in bare.stdout + bare.stderr


def test_command_help_loads_nothing_heavy() -> None:
    """torch, numpy, rich, IPython and the parts of ddpilot that need them stay out of `ddpilot --help`."""
    code = (
        "import sys; sys.argv = ['ddpilot', '--help']\n"
        "from ddpilot.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = ('torch', 'numpy', 'rich', 'IPython', 'importlib.metadata', 'ddpilot.launcher', 'ddpilot.launching')\n"
        "print('loaded:', [name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.endswith("loaded: []\n")


def test_command_topology_prints_what_was_found() -> None:
    """A table for people, one JSON object for programs, of this process's real environment."""
    table = run("topology", environ=RANK_ONE)
    assert table.returncode == 0
    assert table.stdout.startswith("environment  torchrun\nrank         1 of 2\n")
    values = json.loads(run("topology", "--json", environ=RANK_ONE).stdout)
    assert (values["rank"], values["master_port"], values["environment"]) == (1, 29500, "torchrun")
    assert json.loads(run("topology", "--json").stdout)["environment"] == "alone"


def test_command_topology_error_is_one_block_on_stderr() -> None:
    """Status 2, nothing on stdout, no traceback; the message has the finding and the fix."""
    done = run("topology", environ={**RANK_ONE, "RANK": "2"})
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: reading torchrun's variables\n"
        "  found: RANK=2, WORLD_SIZE=2\n"
        "  fix:   RANK counts from 0 and must stay below WORLD_SIZE: correct one of them, or unset both\n"
    )


@pytest.mark.parametrize("arguments", [["nonsense"], ["topology", "--colour"], ["--nonsense"]])
def test_app_refuses_unknown_verbs_and_options(arguments: list[str]) -> None:
    """A usage error is status 2 and quotes what was not understood."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert arguments[-1] in result.output


def test_app_topology_raises_the_error_itself_when_called_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `main` turns errors into text: a program that uses the app gets the exception."""
    monkeypatch.setenv("RANK", "nine")
    monkeypatch.delenv("DDPILOT_DISTRIBUTED", raising=False)
    result = CliRunner().invoke(app, ["topology"])
    assert isinstance(result.exception, TopologyError)
    assert result.exception.variable == "RANK"


def test_render_error_leaves_out_what_is_not_known() -> None:
    """Rank and fix appear where the error has them."""
    assert render_error(DdpilotError("doing", found="7", rank=3)) == "error: [rank 3] doing\n  found: 7"
    assert render_error(DdpilotError("doing", found="7", fix="Do")) == "error: doing\n  found: 7\n  fix:   Do"
