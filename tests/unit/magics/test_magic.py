# SPDX-License-Identifier: Apache-2.0
"""Wrong use of `%ddp` and `%%ddp` before ranks are started; loading and unloading the extension."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.completer import CompletionContext

from ddpilot.errors import LaunchInterrupted
from ddpilot.magics import commands
from ddpilot.magics.commands import COMMANDS
from ddpilot.magics.completion import make_matcher
from ddpilot.magics.extension import load_ipython_extension, unload_ipython_extension
from ddpilot.magics.magic import run_on_ranks
from ddpilot.magics.parser import VERBS, MagicUsageError
from ddpilot.magics.push_pull import SCOPE
from ddpilot.magics.shell_session import ShellSession
from tests.unit.magics.samples import ipython_shell


@pytest.fixture(scope="module")
def shell() -> Iterator[Any]:
    """A shell with the magics."""
    with ipython_shell() as shell:
        load_ipython_extension(shell)
        yield shell


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("strat -n 2", "`strat` is not a verb. Did you mean `start`?"),
        ("print(1)", "`print(1)` is not a verb. The verbs are start, "),
        (
            "--ranks 0 print(1)",
            "Options without a verb belong to the cell magic: write `%%ddp --ranks ...` above the code",
        ),
        ("start --sed 1", "reading `%ddp start`: `--sed 1`. Did you mean `--seed`?"),
        ("start --zzz", "unrecognized arguments: --zzz. Usage: %ddp start [-h] [-n N]"),
        ("start 2", "reading `%ddp start`: `2`. Did you mean `%ddp start -n 2`?"),
        ("start n=2", "Did you mean `%ddp start -n 2`?"),
        ("start --nproc_per_node 2", "Did you mean `-n/--nproc-per-node`?"),
        (
            "start --rank 0",
            "All ranks are started; `-n 2` sets their number, and `%%ddp --ranks 0` runs a cell on some of them",
        ),
        ("restart --ranks 0", "Give the numbers without an option, as in `%ddp restart 0 1`"),
        ("restart --all", "`%ddp restart` without numbers restarts all ranks"),
        ("start 'x", "No closing quotation. Close the quotes"),
        ("start --env A", "argument --env: 'A' is not NAME=value"),
        ("auto maybe", "argument state: invalid choice: 'maybe'"),
        ("pull x --rank 0 --all", "argument --all: not allowed with argument --rank"),
        ("pull", "the following arguments are required: NAME"),
        ("pull x", "pulling: no ranks are running. Type `%ddp start -n 2` first"),
        ("push x", "pushing: no ranks are running. Type `%ddp start -n 2` first"),
        ("auto on", "sending plain cells to the ranks: no ranks are running. Type `%ddp start -n 2` first"),
        ("run train()", "running `train()`: no ranks are running"),
        ("restart x", "argument RANK: 'x' is not the number of a rank"),
        ("restart", "restarting ranks: no ranks are running"),
        ("stacks", "reading stacks: no ranks are running"),
        (
            "doctor nothing",
            "checking `nothing`: the notebook does not have a function of that name. Define it in a cell",
        ),
        ("doctor __name__", "`__name__` is str. Give the name of a function"),
        ("doctor 3 + 4", "Write a call: `%ddp doctor train(epochs=1)`"),
        ("doctor print --no-live", "checking `print`: `--no-live`. Leave it out"),
        ("interrupt", "interrupting the ranks: no ranks are running"),
    ],
)
def test_line_magic_answers_wrong_use_with_the_right_one(shell: Any, line: str, answer: str) -> None:
    """The error shows what to type."""
    with pytest.raises(MagicUsageError) as caught:
        shell.run_line_magic("ddp", line)
    assert answer in str(caught.value)


@pytest.mark.parametrize(
    ("verb", "given", "typed"),
    [
        ("pull", {"names": ["x"], "rank": 7, SCOPE: {}}, "--rank"),
        ("push", {"names": ["x"], "ranks": (0, 7), SCOPE: {}}, "--ranks"),
        ("restart", {"ranks": [7]}, "%ddp restart"),
        ("stacks", {"ranks": [1, 7]}, "%ddp stacks"),
    ],
)
def test_verbs_refuse_a_rank_that_does_not_exist_in_their_own_words(
    verb: str, given: dict[str, Any], typed: str
) -> None:
    """The numbers that exist, and how they are typed, instead of Python's `[0]`."""
    shell_session = ShellSession(shell=None)
    session: Any = SimpleNamespace(is_running=True, world_size=2)
    shell_session._session = session
    wrong = re.escape(f"`{typed} 7`, and the ranks are 0 to 1. Give ranks that exist, as in `{typed} 1`")
    with pytest.raises(MagicUsageError, match=wrong):
        COMMANDS[verb](shell_session, given)
    with pytest.raises(MagicUsageError, match=re.escape("`--ranks 7`, and the ranks are 0 to 1")):
        run_on_ranks(shell_session, "1", {"ranks": (7,)})


@pytest.mark.parametrize("line", ["%ddp", "%ddp --ranks 0"])
def test_code_below_one_percent_sign_does_not_run(shell: Any, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with the correct magic instead of the list of verbs."""
    result = shell.run_cell(f"{line}\nran_here = True")
    assert "Did you mean `%" + line + "`?" in str(result.error_in_exec)
    assert "The cell was not run" in str(result.error_in_exec)
    assert "ran_here" not in shell.user_ns
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "cell", "answer"),
    [
        ("", "x\n", "running a cell on the ranks: no ranks are running. Type `%ddp start -n 2` first"),
        ("", "\n", "there is no code below `%%ddp`. Write the code there"),
        ("--rank 0", "x\n", "reading `%%ddp`: `--rank 0`. Did you mean `--ranks`?"),
        ("--ranks a", "x\n", "'a' is not a list of ranks such as 0,2-3"),
        ("--local --everywhere", "x\n", "argument --everywhere: not allowed with argument --local"),
        ("--local --ranks 0", "x\n", "`--local` runs the cell in the notebook, and --ranks is about the ranks. Leave"),
        ("--keep-cache --local --quiet", "x\n", "and --keep-cache --quiet are about the ranks"),
        ("start -n 2", "x\n", "Write a verb with one %, on a line of its own: `%ddp start`"),
        ("0", "x\n", "Options begin with --, as in `%%ddp --ranks 0`"),
    ],
)
def test_cell_magic_answers_wrong_use_with_the_right_one(shell: Any, line: str, cell: str, answer: str) -> None:
    """The error shows what to type."""
    with pytest.raises(MagicUsageError) as caught:
        shell.run_cell_magic("ddp", line, cell)
    assert answer in str(caught.value)


@pytest.mark.parametrize("line", ["", "help", "-h"])
def test_line_magic_alone_lists_every_verb(shell: Any, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line per verb."""
    shell.run_line_magic("ddp", line)
    said = capsys.readouterr().out
    assert all(f"%ddp {name} " in said and verb.does in said for name, verb in VERBS.items())


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_explain_themselves(shell: Any, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """-h starts nothing, and each has a command."""
    assert verb in COMMANDS
    shell.run_line_magic("ddp", f"{verb} -h")
    assert capsys.readouterr().out.startswith(f"usage: %ddp {verb} [-h]")
    shell.run_cell_magic("ddp", "-h", "x\n")
    assert capsys.readouterr().out.startswith("usage: %%ddp [-h] [--ranks 0,2-3]")


def test_stop_says_that_nothing_runs(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopping twice is not an error."""
    shell.run_line_magic("ddp", "stop")
    assert capsys.readouterr().out == "ddpilot: no ranks are running\n"


def test_start_that_is_stopped_while_modules_load_says_so(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line instead of frames of Python's import system; no rank was started yet."""

    def stop(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ddpilot.magics.shell_session.Session", stop)
    with pytest.raises(LaunchInterrupted, match="starting the ranks was interrupted: no rank is running") as caught:
        shell.run_line_magic("ddp", "start -n 2")
    assert caught.value.__suppress_context__


def test_auto_without_an_argument_shows_its_state(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """And changes nothing."""
    shell.run_line_magic("ddp", "auto")
    assert capsys.readouterr().out == "ddpilot: auto is off: plain cells run in the notebook\n"


def test_local_cell_runs_in_the_notebook_without_any_rank(shell: Any) -> None:
    """As typed and as called, also a cell magic in it; its errors are raised."""
    shell.run_cell("%%ddp --local\nfirst = 1\n").raise_error()
    shell.run_cell_magic("ddp", "--local", "second = 2\n")
    shell.run_cell_magic("ddp", "--local", "%%capture said\nprint('third')\n")
    assert (shell.user_ns["first"], shell.user_ns["second"], shell.user_ns["said"].stdout) == (1, 2, "third\n")
    with pytest.raises(ZeroDivisionError):
        shell.run_cell_magic("ddp", "--local", "1 / 0\n")


def test_local_cell_returns_what_its_cell_magic_returns(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`%%time` returns the value of the last line, which IPython then shows; a last ";" hides it."""
    assert shell.run_cell("%%ddp --local\n%%time\n6 * 7\n").result == 42
    assert shell.run_cell("%%ddp --local\n%%time\n6 * 7;\n").result is None
    assert "Wall time" in capsys.readouterr().out


@pytest.mark.parametrize("above", ["# train", "above = 1"])
def test_cell_magic_below_the_first_line_says_where_it_belongs(shell: Any, above: str) -> None:
    """A comment above it is enough for IPython to look for a line magic; what stands below does not run."""
    result = shell.run_cell(f"{above}\n%%ddp --ranks 0\nran_below = True")
    assert "reading `%%ddp --ranks 0`: it is not the first line of its cell" in str(result.error_in_exec)
    assert "ran_below" not in shell.user_ns


def test_cell_magic_may_be_indented(shell: Any) -> None:
    """Also where the code below it is not."""
    shell.run_cell("  %%ddp --local\nindented = True").raise_error()
    assert shell.user_ns["indented"]


def test_extension_can_be_loaded_again_and_unloaded(capsys: pytest.CaptureFixture[str]) -> None:
    """Loading twice has no effect, and nothing is left after unloading."""
    with ipython_shell() as shell:
        transformers, matchers = list(shell.input_transformers_cleanup), list(shell.Completer.custom_matchers)
        for _ in range(2):
            load_ipython_extension(shell)
        assert len(shell.input_transformers_cleanup) == len(transformers) + 1
        for _ in range(2):
            unload_ipython_extension(shell)
        assert shell.input_transformers_cleanup == transformers
        assert shell.Completer.custom_matchers == matchers
        assert not {"ddp", "%ddp"} & set(shell.magics_manager.magics["line"])
        assert "ddp" not in shell.magics_manager.magics["cell"]
        shell.run_cell("%load_ext ddpilot").raise_error()
        shell.run_cell("%reload_ext ddpilot").raise_error()
        shell.run_cell("%ddp stop").raise_error()
    assert capsys.readouterr() == ("ddpilot: no ranks are running\n", "")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("%ddp st", {"start", "stop", "stacks"}),
        ("%ddp pull --r", {"--rank"}),
        ("%ddp start --b", {"--backend"}),
        ("%%ddp --l", {"--local"}),
        ("%%ddp\nx", set()),
        ("x", set()),
    ],
)
def test_completion_knows_verbs_and_options(shell: Any, text: str, found: set[str]) -> None:
    """Also before ranks are started; other lines are left to IPython's matchers."""
    lines = text.split("\n")
    context = CompletionContext(
        token=lines[-1],
        full_text=text,
        cursor_position=len(lines[-1]),
        cursor_line=len(lines) - 1,
        limit=None,
    )
    result = make_matcher(ShellSession(shell))(context)
    assert {completion.text for completion in result["completions"]} >= found
    assert bool(result["completions"]) is bool(found)


def test_doctor_returns_its_diagnosis(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options of the line; the notebook displays what the line returns."""
    found = shell.run_line_magic("ddp", "doctor --no-live -n 3 --workers 0")
    assert "3 ranks, not started" in str(found)
    assert found._repr_html_().startswith("<div><b>doctor: ")
    given: dict[str, Any] = {}
    monkeypatch.setattr(commands, "doctor", lambda **options: given.update(options))
    shell.run_line_magic("ddp", "doctor --checkpoint-dir runs")
    assert given["checkpoint_dir"] == "runs"
    assert given.get("live", True) is True
    assert "nproc_per_node" not in given
