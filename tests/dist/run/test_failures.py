# SPDX-License-Identifier: Apache-2.0
"""How a run ends when a rank fails: the first failure in time, its exit status, restarts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.dist.launching.scripts import finish
from tests.dist.run.commands import RUN, TORCHRUN, run, run_fresh, started, write
from tests.ports import kept_port

ENDS = {
    "raises": ("raise ValueError('bad sample')", "rank 1 raised ValueError: bad sample"),
    "exits": ("sys.exit(3)", "rank 1 called sys.exit with code 3"),
    "leaves": ("os._exit(4)", "rank 1 exited with code 4"),
    "is killed": ("os.kill(os.getpid(), 9)", "rank 1 was killed by SIGKILL"),
    "crashes": ("import faulthandler; faulthandler._sigsegv()", "rank 1 crashed with SIGSEGV at "),
    "succeeds": ("sys.exit(0)", ""),
}
WAIT = "import os, sys, time\nif os.environ['RANK'] == '1':\n    {}\nif {}:\n    time.sleep(60)\n"
REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    raise ValueError("bad sample")
dist.all_reduce(torch.ones(1))
"""
LEAVE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    sys.exit(0)
dist.all_reduce(torch.ones(1))
"""
THREE_FAIL = """
import os, time
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if attempt == 0 and rank == 1:
    raise RuntimeError("only the first time")
if attempt == 0:
    time.sleep(60)
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1000 if attempt < 3 and rank == 0 else 4))
dist.destroy_process_group()  # or gloo may abort at exit
print("attempt", attempt, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"])
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("end", ENDS)
def test_run_exits_as_torchrun_does_and_names_the_rank(tmp_path: Path, end: str) -> None:
    """The other rank would sleep for a minute: it is ended, and the exit status is torchrun's, 1 for any failure."""
    line, said = ENDS[end]
    write(tmp_path, "train.py", WAIT.format(line, end != "succeeds"))
    done = run(tmp_path, "-n", 2, "train.py", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    assert done.code == (0 if end == "succeeds" else 1)
    if end == "raises":  # for the scheduler, in torch's words
        assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: bad sample"
    if end == "exits":
        with started([*TORCHRUN, "--standalone", "--nproc-per-node", 2, "train.py"], tmp_path) as theirs:
            assert done.code == finish(theirs).code
    assert done.notes() == [] if not said else done.notes()[-1].startswith(f"ddpilot: {said}")
    if end == "exits":  # Python says nothing of it
        assert f'File "{tmp_path / "train.py"}", line 3, in <module>\n    sys.exit(3)' in done.err
    if end == "crashes":
        assert f"{tmp_path / 'train.py'}:3 in <module>" in done.notes()[-1]


@pytest.mark.timeout(120)
def test_run_names_the_cause_when_another_rank_fails_because_of_it(tmp_path: Path) -> None:
    """Rank 0 sits in an all_reduce when rank 1 raises: its broken connection is a consequence, and is called so."""
    write(tmp_path, "train.py", REDUCE)
    done = run(tmp_path, "-n", 2, "train.py")
    assert done.code == 1
    assert done.notes()[-1].startswith(
        "ddpilot: rank 1 raised ValueError: bad sample (running `train.py` on 2 ranks on "
    )
    final = done.err[done.err.rindex("ddpilot: ") :]
    assert f'File "{tmp_path / "train.py"}", line 6, in <module>' in final
    if "Connection" in done.err:  # rank 0 noticed before it was ended
        assert "Rank 0 failed because of it (a connection to a rank went away)." in final


@pytest.mark.timeout(120)
def test_run_begins_with_why_a_rank_lost_its_connection(tmp_path: Path) -> None:
    """Rank 1 has left without an error, so that the only error there is belongs to rank 0, which waits for it."""
    write(tmp_path, "train.py", LEAVE)
    done = run(tmp_path, "-n", 2, "train.py")
    assert done.code == 1
    said, _, consequence = done.notes()[-1].partition("So rank 0 raised RuntimeError: ")
    assert "rank 1 has returned, and rank 0 waits for it in all_reduce" in said
    assert not consequence or "Connection closed by peer" in consequence


@pytest.mark.timeout(120)
def test_run_restarts_all_ranks_and_says_why_with_what_was_proven(tmp_path: Path) -> None:
    """One line per restart with the rank and its error; a finding follows it, once while attempts fail in the same way.

    The last attempt succeeds, and so does the run.
    """
    write(tmp_path, "train.py", THREE_FAIL)
    done = run(tmp_path, "-n", 2, "--max_restarts=3", "train.py")
    assert done.code == 0
    said = "rank 1 raised RuntimeError: only the first time"
    ahead = [note for note in done.notes() if note.endswith("the report follows once the ranks have exited")]
    place = f"ddpilot: {said}, at {tmp_path / 'train.py'}:5  raise "
    assert all(note.startswith(place) for note in ahead if "raised" in note)
    first, restart, found, again = [note for note in done.notes() if note not in ahead]
    assert first == f"ddpilot: restart 1 of 3: {said}"
    differs = "collective #0 of the default group differs"
    # The second where the watch looked before gloo aborted the rank.
    whys = ("rank 1 was aborted (SIGABRT)", f"size-mismatch (DDP202): {differs}")
    assert restart.removeprefix("ddpilot: restart 2 of 3: ").startswith(whys)
    assert found.startswith(f"ddpilot: size-mismatch  DDP202  {differs}")
    assert "train.py:10  dist.all_reduce(" in done.err.partition(found)[2].partition(again)[0]
    assert again.removeprefix("ddpilot: restart 3 of 3: ").startswith(whys)
    assert "size-mismatch  DDP202" not in done.err.partition(again)[2]
    assert done.out.count("attempt 3 of 3") + done.out.count("[ranks 0,1] attempt 3 of 3") == 2


@pytest.mark.timeout(120)
def test_run_says_what_a_rank_raised_while_that_takes_its_time_to_end(tmp_path: Path) -> None:
    """What it does at exit is done, after the line; the whole report and the exit status are what they were."""
    write(
        tmp_path,
        "train.py",
        "import atexit, os, sys, time\ndef leave():\n    time.sleep(3)\n    print('said at exit', file=sys.stderr)\n"
        "if os.environ['RANK'] == '1':\n    atexit.register(leave)\n    raise ValueError('bad sample')\n"
        "time.sleep(60)",
    )
    done = run(tmp_path, "-n", 2, "train.py")
    assert done.code == 1
    ahead, report = done.notes()
    assert ahead == (
        f"ddpilot: rank 1 raised ValueError: bad sample, at {tmp_path / 'train.py'}:7  raise ValueError('bad sample'); "
        "the report follows once the ranks have exited"
    )
    assert report.startswith("ddpilot: rank 1 raised ValueError: bad sample (running `train.py` on 2 ranks on ")
    assert done.err.index(ahead) < done.err.index("said at exit") < done.err.index(report)


@pytest.mark.timeout(120)
def test_run_says_why_while_the_other_ranks_take_their_time(tmp_path: Path) -> None:
    """Rank 1 is gone at once; rank 0 holds out against SIGTERM, until it is killed."""
    hold = (
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(f'{os.environ[\"RANK\"]}', 'w').close()\n"
    )
    until = "while not os.path.exists('0'):\n    time.sleep(0.01)\n"
    write(tmp_path, "train.py", "import os, time\n" + hold + until + WAIT.format("os._exit(4)", "True"))
    done = run(tmp_path, "-n", 2, "train.py")
    assert done.notes()[0] == "ddpilot: rank 1 exited with code 4; the report follows once the ranks have exited"
    assert done.notes()[1].startswith("ddpilot: rank 1 exited with code 4 (running `train.py` on 2 ranks on ")


@pytest.mark.timeout(120)
def test_run_waits_for_exit_handlers_and_then_ends_a_rank_that_a_thread_keeps(tmp_path: Path) -> None:
    """What a script does at exit is done; a thread that never ends does not hang the job, as it does under torchrun."""
    write(
        tmp_path,
        "train.py",
        "import atexit, threading, time\natexit.register(print, 'said at exit')\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\nraise ValueError('bad sample')",
    )
    done = run(tmp_path, "train.py")
    assert done.code == 1
    assert done.notes()[-2] == (
        "ddpilot: rank 0 raised ValueError and has not exited after 5 s because of a thread or an exit handler; "
        "terminating all ranks"
    )


@pytest.mark.timeout(120)
def test_run_without_python_starts_any_program(tmp_path: Path) -> None:
    """Its last output is in the error, since it reports nothing else. Works without UTF-8 too."""
    line = "printf 'caf\\303\\251\\n'; echo this is $RANK; exit $((RANK * 7))"
    done = run_fresh(tmp_path, "--no-python", "-n", 2, "sh", "-c", line, PYTHONIOENCODING="ascii")
    assert done.code == 1
    assert "caf\\xe9" in done.out
    assert "[rank 0] this is 0" in done.out
    assert done.notes()[-1].startswith("ddpilot: rank 1 exited with code 7 (running `sh` on 2 ranks on ")
    assert done.err.endswith("Last output of rank 1:\n  caf\\xe9\n  this is 1\n")


@pytest.mark.timeout(120)
def test_run_without_python_watches_what_is_python(tmp_path: Path) -> None:
    """A shell that runs Python on each rank: a mismatch is found, and ends the ranks."""
    write(
        tmp_path,
        "train.py",
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "if dist.get_rank():\n    dist.barrier()\nelse:\n    dist.all_reduce(torch.ones(2))\n",
    )
    done = run(tmp_path, "--no-python", "-n", 2, "sh", "-c", f"{sys.executable} train.py")
    assert done.code == 1
    assert "desync  DDP201  collective #0 of the default group differs between ranks" in done.err
    off = run(tmp_path, "--no-python", "--no-watch", "sh", "-c", "echo watched: $DDPILOT_WATCH.")
    assert "watched: ." in off.out


@pytest.mark.timeout(120)
def test_run_tells_another_agent_which_rank_failed(tmp_path: Path) -> None:
    """Two agents on this machine as two nodes: both end with the error of the rank that failed."""
    write(tmp_path, "train.py", WAIT.format("raise ValueError('bad sample')", "True"))
    with kept_port() as port:
        words = ["--nnodes=2", "-n", 1, "--master-addr=127.0.0.1", "--master-port", port]
        with (
            started([*RUN, *words, "--node-rank=0", "train.py"], tmp_path) as zero,
            started([*RUN, *words, "--node-rank=1", "train.py"], tmp_path) as one,
        ):
            ends = [finish(zero), finish(one)]
    assert [done.code for done in ends] == [1, 1]
    for done in ends:
        assert done.notes()[-1].startswith(
            "ddpilot: rank 1 raised ValueError: bad sample (running `train.py` on 2 ranks on "
        )
        assert f'File "{tmp_path / "train.py"}", line 3, in <module>' in done.err
    assert ends[0].err.endswith("On this node, rank 0 terminated.\n")


NO_GRADIENT = """
import torch
try:
    torch.ones(2).sum().backward()
except RuntimeError:
    torch.ones(3).sum().backward()
"""


@pytest.mark.timeout(120)
def test_run_shows_tracebacks_without_what_guard_put_around_torch(tmp_path: Path) -> None:
    """Neither as the rank prints it nor in the report, also for the error that led to it."""
    write(tmp_path, "train.py", NO_GRADIENT)
    done = run(tmp_path, "-n", 1, "train.py")
    assert done.code == 1
    assert "During handling of the above exception" in done.err
    assert "_engine_run_backward" in done.err
    assert "probe.py" not in done.err


def test_run_says_which_limit_is_too_low_for_its_pipes(tmp_path: Path) -> None:
    """Two pipes for each rank do not fit into the limit of open files: its command is named, without a traceback."""
    write(tmp_path, "train.py", "")
    limited = ["sh", "-c", 'ulimit -n 30; exec "$@"', "sh", *RUN, "-n", 8, "train.py"]
    with started(limited, tmp_path) as process:
        done = finish(process)
    assert done.code == 1
    assert "too many open files: this process may have 30 open at a time" in done.err
    assert "Raise `ulimit -n`" in done.err
    assert "Traceback" not in done.err
