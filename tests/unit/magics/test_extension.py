# SPDX-License-Identifier: Apache-2.0
"""Which cells run on the ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ddpilot.magics.extension import EVERYWHERE, HERE, CellTransformer
from ddpilot.magics.shell_session import ShellSession
from tests.unit.magics.samples import ipython_shell


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    """A shell whose transformers are used."""
    with ipython_shell() as shell:
        yield shell


@pytest.fixture
def shell_session(shell: InteractiveShell) -> ShellSession:
    """A shell session with auto on."""
    shell_session = ShellSession(shell)
    shell_session.is_auto = True
    return shell_session


def route(shell_session: ShellSession, cell: str) -> str:
    """The cell as transformed for IPython."""
    return "".join(CellTransformer(shell_session)(cell.splitlines(keepends=True)))


def sent(line: str) -> str:
    """The code in a line that sends it to the ranks."""
    call = ast.parse(line).body[0]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    name, option, code = (ast.literal_eval(arg) for arg in call.value.args)
    assert (name, option) == ("ddp", "--whole")
    return str(code)


def test_router_sends_plain_cells_to_the_ranks(shell_session: ShellSession) -> None:
    """The whole cell, unchanged, so that line numbers are kept."""
    cell = "x = 1\n\nif x:\n    print('%ddp')\n"
    assert sent(route(shell_session, cell)) == cell
    assert sent(route(shell_session, "%time x = train()\n")) == "%time x = train()\n"
    assert sent(route(shell_session, "files = !ls\nx")) == "files = !ls\nx"


NOTEBOOKS = (
    *("", "\n", "# a comment\n", "!ls\n", "!ls\n!pwd\n", "%pip install x\n", "%ddp status\n", "r = %ddp run f()\n"),
    *("%load_ext ddpilot\n", "%reload_ext ddpilot\n"),
    *("%%time\nx\n", "%%bash\nls\n", "%%ddp\nx\n", "%%ddp --ranks 0\nx\n"),
)


@pytest.mark.parametrize("cell", NOTEBOOKS)
def test_router_leaves_cells_that_are_the_notebooks(shell_session: ShellSession, cell: str) -> None:
    """Other cell magics, shell commands, installers, `%ddp` itself and empty cells."""
    assert route(shell_session, cell) == cell


def test_router_sends_setting_up_everywhere(shell_session: ShellSession) -> None:
    """`%matplotlib inline` and the like change the notebook and the ranks."""
    cell = "%load_ext autoreload\n# why\n%autoreload 2"
    first, rest = route(shell_session, cell).split("get_ipython()")
    assert first == f"{cell}\n"
    assert sent(f"get_ipython(){rest}") == cell
    assert "ddp" not in EVERYWHERE | HERE
    assert not EVERYWHERE & HERE


def test_router_splits_cells_at_lines_of_the_notebook(shell_session: ShellSession) -> None:
    """In order, and with the numbers of the cell's lines."""
    lines = route(shell_session, "%ddp push x\ny = x\n%pip list\nz = y\n1/0\n%ddp pull z").splitlines(keepends=True)
    assert [lines[0], lines[2], lines[4]] == ["%ddp push x\n", "%pip list\n", "%ddp pull z\n"]
    assert sent(lines[1]) == "# %ddp push x\ny = x\n"
    assert sent(lines[3]) == "# %ddp push x\n# y = x\n# %pip list\nz = y\n1/0\n"


@pytest.mark.parametrize("is_auto", [True, False])
def test_router_makes_local_cells_plain_code(shell_session: ShellSession, is_auto: bool) -> None:
    """IPython runs them as any other; their lines keep their numbers."""
    shell_session.is_auto = is_auto
    assert route(shell_session, "%%ddp --local\nx = 1\nx\n") == "# %%ddp --local\nx = 1\nx\n"
    nested = "%%ddp --local\n%%time\nx\n"
    assert route(shell_session, nested) == nested


def test_router_makes_cells_for_everywhere_plain_code_behind_the_ranks(shell_session: ShellSession) -> None:
    """The ranks come first, in the line of `%%ddp`."""
    call, *body = route(shell_session, "%%ddp --everywhere\nimport os\nos\n").splitlines(keepends=True)
    assert sent(call) == "# %%ddp --everywhere\nimport os\nos\n"
    assert body == ["import os\n", "os\n"]


def test_router_leaves_everything_while_auto_is_off(shell_session: ShellSession) -> None:
    """Also inside what is run on purpose in the notebook, and what a front end runs for itself."""
    with shell_session.local():
        assert route(shell_session, "x\n") == "x\n"
    assert route(shell_session, "x\n") != "x\n"
    shell_session.is_auto = False
    assert route(shell_session, "x\n") == "x\n"


def test_router_leaves_what_a_front_end_runs_for_itself(
    shell_session: ShellSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of variables is asked for with a silent request."""
    parent: dict[str, Any] = {"content": {"silent": True}}
    monkeypatch.setattr(shell_session.shell, "get_parent", lambda: parent, raising=False)
    assert route(shell_session, "x\n") == "x\n"
    parent["content"]["silent"] = False
    assert route(shell_session, "x\n") != "x\n"


def test_router_does_not_change_when_a_cell_is_complete(shell_session: ShellSession) -> None:
    """A terminal checks whether a block is complete on the code as typed, not on a cell magic."""
    router = CellTransformer(shell_session)
    shell_session.shell.input_transformers_cleanup.append(router)
    try:
        assert shell_session.shell.check_complete("x = 1")[0] == "complete"
        assert shell_session.shell.check_complete("for i in x:")[0] == "incomplete"
        assert "run_cell_magic" in shell_session.shell.transform_cell("x = 1")
    finally:
        shell_session.shell.input_transformers_cleanup.remove(router)


def test_router_leaves_the_end_of_a_terminal_to_ipython(
    shell_session: ShellSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`exit` ends the shell in a terminal; in a notebook it runs on the ranks, which show how to stop them."""
    for word in ("exit", "quit()\n"):
        assert route(shell_session, word) == word
    monkeypatch.setattr(shell_session.shell, "kernel", object(), raising=False)
    assert sent(route(shell_session, "exit\n")) == "exit\n"


@pytest.mark.parametrize("is_auto", [False, True])
@pytest.mark.parametrize("line", ["%ddp", "%ddp --ranks 0", "%ddp  "])
def test_router_refuses_code_below_one_percent_sign_where_two_were_meant(
    shell_session: ShellSession, line: str, is_auto: bool
) -> None:
    """The cell does not run in the notebook, which has different variables."""
    shell_session.is_auto = is_auto
    option = line[4:].strip()
    expected = f"get_ipython().run_line_magic('ddp', '{f'--above-code {option}'.rstrip()}')\n"
    assert route(shell_session, f"{line}\nx = 1\n") == expected


@pytest.mark.parametrize("cell", ["%ddp", "%ddp\n# why\n", "%ddp -h\nx\n", "%ddp --help\nx", "%ddp start -n 2\nx\n"])
def test_router_leaves_lines_that_are_meant_so(shell_session: ShellSession, cell: str) -> None:
    """Alone it lists the verbs; a verb is allowed above code."""
    shell_session.is_auto = False
    assert route(shell_session, cell) == cell
