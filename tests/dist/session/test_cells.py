# SPDX-License-Identifier: Apache-2.0
"""Cells on persistent ranks: state, output, errors, and common mistakes in notebooks."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import pytest
import zmq

from ddpilot import LaunchError, LaunchInterrupted, RankError, Session
from tests.dist.session.conftest import Kept, stopping_once_noted

Start = Callable[..., Session]


def test_cells_share_a_namespace_with_rank_world_size_device_and_group(lent: Start, view: Kept) -> None:
    """Variables set by one cell are available in the next one, per rank, next to the session's four names."""
    session = lent(2)
    session.execute("mine = rank * 10")
    session.execute("print(mine, world_size, device, group.rank, group.world_size)")
    assert view.texts == {0: "0 2 cpu 0 2\n", 1: "10 2 cpu 1 2\n"}
    # A watchdog of NCCL would end the rank, and with it what one cell sets.
    session.execute("import os; assert os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING'] == '0'")


def test_execute_runs_on_chosen_ranks_alone(start: Start, view: Kept) -> None:
    """The other ranks do not see the cell."""
    session = start(3)
    assert session.execute("here = True", ranks=[2, 0, 2]).ranks == (0, 2)
    session.execute("print('here' in globals())")
    assert view.texts == {0: "True\n", 1: "False\n", 2: "True\n"}


def test_results_streams_and_c_output_arrive_from_every_rank(lent: Start, view: Kept) -> None:
    """A last expression, stdout, stderr, a subprocess and output of C code."""
    session = lent(2)
    session.execute(
        "import os, sys\nprint('out'); print('err', file=sys.stderr)\n"
        "os.write(1, b'from C\\n'); os.system('echo child')\n6 * 7"
    )
    for rank in range(2):
        assert view.results()[rank] == "42"
        assert {"out", "err"} <= set(view.texts[rank].split())
        assert {b"from C", b"child"} <= set(view.raws[rank].splitlines())


def test_a_quiet_cell_shows_nothing(lent: Start, view: Kept) -> None:
    """Output and result are not shown; variables are set."""
    session = lent(2)
    session.execute("print('noise'); kept = 1; kept", quiet=True)
    assert not view.texts
    assert not view.messages
    assert session.pull("kept") == [1, 1]


def test_every_line_of_many_arrives(lent: Start, view: Kept) -> None:
    """100,000 lines of each rank, complete and in order."""
    session = lent(2)
    session.execute("for number in range(100_000): print(number)")
    wanted = "".join(f"{number}\n" for number in range(100_000))
    assert view.texts == {0: wanted, 1: wanted}


def test_an_error_names_rank_cell_and_line(lent: Start, view: Kept) -> None:
    """The traceback is that of the cell, and the view shows it before the exception is raised."""
    session = lent(2)
    with pytest.raises(RankError, match="rank 1 raised ZeroDivisionError: division by zero") as caught:
        session.execute("a = 1\nif rank == 1:\n    a / 0", cell=7)
    assert "Cell In[7], line 3" in str(caught.value)
    assert view.errors == [caught.value]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("1 +", "SyntaxError"),
        ("  x = 1\n y = 2", "IndentationError"),
        ("raise SystemExit(3)", "called sys.exit with code 3"),
        ("import sys; sys.exit()", "called sys.exit with code 0"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("%no_such_magic", "UsageError: Line magic function `%no_such_magic` not found"),
        ("await none()", "NameError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_a_cell_that_cannot_run_is_an_error_and_the_next_one_runs(
    lent: Start, view: Kept, code: str, found: str
) -> None:
    """Also where nothing of the cell was executed."""
    session = lent(2)
    with pytest.raises(RankError, match=found):
        session.execute(code)
    session.execute("'still here'")
    assert view.results() == {0: "'still here'", 1: "'still here'"}


FAILING_CLEAN_UP = """
import ddpilot.session.rank.kernel as kernel
release = kernel.release_memory
def fail(*_, **__):
    kernel.release_memory = release
    raise ValueError('the device has failed')
kernel.release_memory = fail
"""


def test_an_error_of_the_clean_up_between_cells_keeps_no_cell_from_running(lent: Start, view: Kept) -> None:
    """The clean-up is due when the next cell comes, if that comes at once."""
    session = lent(1)
    session.execute(FAILING_CLEAN_UP)
    session.execute("print('next', kernel.release_memory is release)")
    assert "next True\n" in view.texts[0]


def test_exit_and_quit_end_no_rank(lent: Start, view: Kept) -> None:
    """They show how to stop the ranks."""
    session = lent(2)
    session.execute("exit()")
    session.execute("quit")
    session.execute("group.barrier()")
    assert "session.stop()" in view.texts[0]


def test_exit_below_another_line_ends_no_rank_and_is_no_error(lent: Start, view: Kept) -> None:
    """IPython passes its shell to `exit` only in cells of one line; below `%%ddp` there are two."""
    session = lent(1)
    session.execute("# a comment\nquit()")
    assert "session.stop()" in view.texts[0]


def test_semicolon_at_the_end_hides_the_value(lent: Start, view: Kept) -> None:
    """As in IPython: also below a cell magic, and a cell without one shows its value again."""
    session = lent(1)
    for code in ("5;", "%%time\n6;", "'a;'"):
        session.execute(code)
    shown = [message.content["data"]["text/plain"] for message in view.messages if message.kind == "execute_result"]
    assert shown == ["'a;'"]


def test_cells_find_their_history_and_exit_says_what_it_does(start: Start, view: Kept) -> None:
    """`In` counts as the notebook does, `%history` lists the cells, and a bare `exit` shows no object."""
    session = start(1)
    session.execute("first = 1", cell=3)
    session.execute("print(In[3], In[-1])\n%history\nexit", cell=4)
    assert view.texts[0].startswith("first = 1 print(In[3]")
    assert "\nfirst = 1\nprint(In[3], In[-1])" in view.texts[0]
    assert "\n\n" not in view.texts[0]
    assert "session.stop()" in view.results()[0]


def test_an_interrupted_coroutine_is_not_blamed_on_ddpilot(lent: Start, view: Kept) -> None:
    """`asyncio.run` in a cell is an error; Python's warning about the coroutine would name a line of ours."""
    with pytest.raises(RankError, match=r"asyncio\.run\(\) cannot be called"):
        lent(1).execute("import asyncio\nasync def wait(): pass\nasyncio.run(wait())")
    assert "never awaited" not in "".join(view.texts.values())


@pytest.mark.parametrize("stop", ["import pdb; pdb.set_trace()", "breakpoint()"])
def test_debugger_asks_and_shows_the_lines_around(start: Start, view: Kept, stop: str) -> None:
    """pdb's prompt, with the source of the cell."""
    session, view.answers = start(1), ["p inside + 1", "c"]
    session.execute(f"def f():\n    inside = 41\n    {stop}\n    return inside\nf();")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", view.texts[0])
    assert "Cell In[1](4)f()" in plain
    assert "----> 4     return inside" in plain
    assert "42\n" in plain
    assert [prompt for _, prompt, _ in view.asked] == ["ipdb> ", "ipdb> "]


def test_pdb_on_waits_for_a_person_and_debug_says_what_to_do(start: Start, view: Kept) -> None:
    """Formatting a traceback is limited to 0.7 s, the debugger is not; afterwards the frames are dropped."""
    session, answers = start(1), iter(["p inside + 1", "q"])

    def answer(rank: int, prompt: str, password: bool) -> str:
        time.sleep(0.8)
        return next(answers)

    view.ask = answer  # type: ignore[method-assign]
    session.execute("%pdb on")
    with pytest.raises(RankError, match="ZeroDivisionError"):
        session.execute("def f():\n    inside = 41\n    1 / 0\nf()")
    assert "42\n" in view.texts[0]
    assert next(answers, None) is None
    session.execute("%pdb off\n%debug")
    assert "`%pdb on` opens pdb at the next error" in view.texts[0]


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("x = 1\n%ddp pull x", "`%ddp pull x` is for the notebook, and this cell runs on the ranks"),
        ("%%ddp\nx = 1", "`%%ddp` is in a cell that already runs on the ranks"),
        ("x = 1\n%%ddp --ranks 0\ny = 1", "`%%ddp --ranks 0` is in a cell that already runs on the ranks"),
    ],
)
def test_magics_of_the_notebook_say_where_they_belong(lent: Start, view: Kept, code: str, answer: str) -> None:
    """Neither exists on the ranks; IPython would report an unknown magic."""
    with pytest.raises(RankError) as caught:
        lent(1).execute(code)
    assert answer in str(caught.value)
    assert view.texts == {}


def test_sys_exit_is_an_error_with_its_line(start: Start, view: Kept) -> None:
    """IPython's hint on how to exit is not shown."""
    with pytest.raises(RankError, match=r"called sys\.exit with code 3") as caught:
        start(2).execute("import sys, warnings\nwarnings.simplefilter('always')\nsys.exit(3)")
    assert "Cell In[1]" in caught.value.rank_traceback
    assert "line 3" in caught.value.rank_traceback
    assert view.texts == {}


def test_cells_may_await_and_use_magics(lent: Start, view: Kept) -> None:
    """Top-level await, line and cell magics and shell commands work as in a notebook."""
    session = lent(2)
    session.execute("import asyncio\nawait asyncio.sleep(0.01)\nawaited = True")
    session.execute("%%capture seen\nprint('captured')")
    session.execute("assert awaited and seen.stdout == 'captured\\n'\n!echo shell")
    assert "shell" in view.texts[0]


@pytest.mark.parametrize("first", ["", "%matplotlib inline\n"])
def test_figures_arrive_as_images(lent: Start, view: Kept, first: str) -> None:
    """As in a notebook, also without selecting the inline backend."""
    session = lent(2)
    session.execute(first + "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()", ranks=[1])
    assert any("image/png" in m.content.get("data", {}) for m in view.messages if m.rank == 1)


def test_input_asks_here_and_answers_there(start: Start, view: Kept) -> None:
    """`input` and `getpass` of a rank are asked with its number; without an answer the rank sees the end of input."""
    session = start(2)
    view.answers = ["Ada", "secret"]
    session.execute("from getpass import getpass\nprint(input('name? '), getpass('word? '))", ranks=[1])
    assert view.asked == [(1, "name? ", False), (1, "word? ", True)]
    assert view.texts == {1: "Ada secret\n"}
    with pytest.raises(RankError, match="EOFError"):
        session.execute("input()", ranks=[0])


def test_input_waits_for_the_connection_to_be_asked_over(start: Start, view: Kept) -> None:
    """An input request sent before the session has connected to the stdin channel is not lost."""
    session = start(2)
    io_thread = session._kernels.io_thread
    channel = io_thread._channels[1].sockets["stdin"]
    url = channel.getsockopt_string(zmq.LAST_ENDPOINT)
    io_thread.call(lambda: channel.disconnect(url))
    view.answers = ["Ada"]
    connecting = threading.Timer(0.5, lambda: io_thread.call(lambda: channel.connect(url)))
    connecting.start()
    session.execute("print(input('name? '))", ranks=[1])
    connecting.join()
    assert view.texts == {1: "Ada\n"}


def test_output_between_cells_is_not_lost(lent: Start, view: Kept) -> None:
    """Output of a thread after its cell is shown, and a full pipe does not block a rank."""
    session = lent(2)
    session.execute(
        "import threading, os, time\ndone = threading.Event()\n"
        "def late():\n    time.sleep(0.2); os.write(1, b'x' * 500_000); done.set()\n"
        "threading.Thread(target=late).start()"
    )
    session.execute("done.wait(20)")
    assert len(view.raws[0]) == len(view.raws[1]) == 500_000


def test_stacks_say_where_ranks_are_now(lent: Start) -> None:
    """The user's frames, by cell and line, also while a rank is stuck in C++; idle if nothing runs."""
    session = lent(2)
    session.execute("group.barrier()")
    assert session.stacks() == {0: "idle", 1: "idle"}
    found: dict[int, str] = {}

    def look() -> None:
        while not ("barrier" in found.get(0, "") and "work" in found.get(1, "")):
            found.update(session.stacks())

    looker = threading.Thread(target=look)
    looker.start()
    session.execute("import time\ndef work():\n    time.sleep(2)\nif rank == 1:\n    work()\ngroup.barrier()", cell=4)
    looker.join(10)
    assert 'File "Cell In[4]", line 3 in work' in found[1]
    assert 'File "Cell In[4]", line 6 in <module>' in found[0]
    assert "ipykernel" not in found[0]


def test_complete_knows_the_variables_of_a_rank(lent: Start) -> None:
    """Names of that rank's namespace; nothing from a dead one."""
    session = lent(2)
    session.execute("temperature = 1")
    matches, begin, end = session.complete("x = tempera", 11, rank=1)
    assert "temperature" in matches
    assert (begin, end) == (4, 11)


def test_wrong_use_says_the_right_use(start: Start) -> None:
    """Ranks that do not exist, no ranks, a session that was stopped."""
    session = start(2)
    with pytest.raises(LaunchError, match="the ranks are 0 to 1"):
        session.execute("1", ranks=[2])
    with pytest.raises(LaunchError, match="no ranks"):
        session.execute("1", ranks=[])
    with pytest.raises(LaunchError, match=r"`apps=\('fastai',\)`"):
        Session(2, apps="fastai")
    with pytest.raises(LaunchError, match="3 ranks for 2 GPUs"):
        Session(3, gpus=(0, 1))
    with pytest.raises(LaunchError, match="reading `seed`"):
        Session(2, seed=-1)
    session.stop()
    session.stop()
    with pytest.raises(LaunchError, match="the session was stopped"):
        session.execute("1")


def test_text_that_utf8_cannot_write_arrives_escaped(lent: Start, view: Kept) -> None:
    """Half a surrogate pair in a line and in an error does not prevent a reply."""
    session = lent(2)
    session.execute("print('before', chr(0xD800), 'after')")
    assert view.texts[0] == "before \\ud800 after\n"
    with pytest.raises(RankError, match="ValueError: half"):
        session.execute("raise ValueError('half ' + chr(0xD800))")
    session.execute("print('on')")


def test_a_result_that_cannot_be_shown_says_why(lent: Start, view: Kept) -> None:
    """The traceback of a `__repr__` that raises is on stderr, as in a notebook; the cell is not a failure."""
    session = lent(2)
    session.execute("class Odd:\n    def __repr__(self): raise ValueError('bad repr')\nOdd()")
    assert "bad repr" in view.texts[0]


def test_a_collective_in_a_cell_on_some_ranks_is_named_and_the_next_cell_works(start: Start, view: Kept) -> None:
    """It waits for ranks that do not run the cell; a group of the ranks that do can be used."""
    session = start(3)
    session.execute("import torch, torch.distributed as dist\npair = dist.new_group([0, 1])")
    session.execute("dist.barrier(pair)", ranks=[0, 1])
    with stopping_once_noted(session, view), pytest.raises(LaunchInterrupted):
        session.execute("ones = torch.ones(1)\ndist.all_reduce(ones)", ranks=[0], cell=7)
    assert view.notes[0] == (
        "rank 0 waits in all_reduce of Cell In[7], line 2, which every rank must call, but the cell runs on rank 0 "
        "only: interrupt it and run it on all ranks"
    )
    assert sum("must call" in note for note in view.notes) == 1
    session.execute("dist.barrier()")


def test_what_is_written_past_python_is_there_when_the_cell_is_over(start: Start, view: Kept) -> None:
    """It is received through a pipe, not from the kernel, and never shown in the next cell."""
    session = start(2)
    for number in range(30):
        session.execute(f"import os; os.write(1, b'{number} ')")
        assert view.raws == {rank: "".join(f"{each} " for each in range(number + 1)).encode() for rank in (0, 1)}
