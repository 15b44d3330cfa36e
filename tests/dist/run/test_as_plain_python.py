# SPDX-License-Identifier: Apache-2.0
"""A script in a rank finds what plain Python gives it, and torchrun's variables."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launching.scripts import Outcome, finish
from tests.dist.run.commands import TORCHRUN, environment, run, run_with_fresh_ranks, started, write

pytestmark = pytest.mark.usefixtures("collects_at_exit")

LOOK = """
import atexit, inspect, json, multiprocessing, os, pickle, sys

class Defined:
    pass

def child(queue):
    queue.put((__name__, Defined.__module__))

def child_names():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    names = queue.get()
    process.join()
    return names

if __name__ == "__main__":
    main = sys.modules["__main__"]
    assert type(pickle.loads(pickle.dumps(Defined()))) is Defined
    print(json.dumps({
        "argv": sys.argv, "path0": sys.path[0], "file": __file__,
        "spec": None if __spec__ is None else __spec__.name,
        "package": __package__, "is main": vars(main) is globals(), "loader": type(__loader__).__name__,
        "names": sorted(vars(main)), "builtins": type(__builtins__).__name__,
        "child": child_names(), "source": inspect.getsource(child),
        "unbuffered": sys.stdout.write_through, "hook": sys.excepthook is sys.__excepthook__,
        "atexit": atexit._ncallbacks(),
    }))
"""

APPLICATION = """
import json, part, sys
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "file": __file__, "spec": __spec__.name, "package": __package__,
    "names": sorted(globals()), "loader": type(__loader__).__name__, "part": part.VALUE,
}))
"""

FAIL = """
import sys

def inner():
    raise KeyError("no such label")

def outer():
    try:
        inner()
    except KeyError as error:
        raise ValueError("bad sample") from error

outer()
"""


def said_by_rank_zero(done: Outcome) -> Any:
    """The JSON that rank 0 printed."""
    assert done.code == 0, done.err
    line = next(line for line in done.out.splitlines() if line.startswith(("[rank 0] {", "[ranks 0,1] {")))
    return json.loads(line.partition("] ")[2])


def plain(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The same words with plain Python."""
    command = [sys.executable, "-u", *words]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", [["sub/look.py"], ["-m", "sub.look"]], ids=["script", "module"])
def test_run_shows_a_script_what_plain_python_shows_it(tmp_path: Path, words: list[str]) -> None:
    """Arguments, path, names of `__main__`, pickling and spawned children are as in plain Python."""
    write(tmp_path, "sub/look.py", LOOK)
    write(tmp_path, "sub/__init__.py", "")
    args = ["--epochs", "3", "a b", "--", "-n"]
    mine = said_by_rank_zero(run_with_fresh_ranks(tmp_path, "-n", 1, *words, *args))
    theirs = json.loads(plain(tmp_path, *words, *args).stdout)
    assert mine == theirs
    assert mine["argv"][1:] == args


@pytest.mark.timeout(120)
@pytest.mark.parametrize("target", ["./app/", "app.pyz"])
def test_run_starts_an_application_as_plain_python_does(tmp_path: Path, target: str) -> None:
    """A directory or a zip file with a `__main__.py` is its own first place to import from."""
    main = write(tmp_path, "app/__main__.py", APPLICATION)
    write(tmp_path, "app/part.py", "VALUE = 7\n")
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        for path in (main, main.with_name("part.py")):
            archive.write(path, path.name)
    mine = said_by_rank_zero(run_with_fresh_ranks(tmp_path, "-n", 1, target, "-x"))
    assert mine == json.loads(plain(tmp_path, target, "-x").stdout)
    assert mine["argv"] == [target, "-x"]


@pytest.mark.timeout(120)
def test_run_shows_the_traceback_that_plain_python_shows(tmp_path: Path) -> None:
    """Chained exceptions included, without a line of the program around the script."""
    write(tmp_path, "fail.py", FAIL)
    done = run_with_fresh_ranks(tmp_path, "fail.py")
    shown = "\n".join(line.removeprefix("[rank 0] ") for line in done.err.splitlines() if line.startswith("[rank 0] "))
    assert shown + "\n" == plain(tmp_path, "fail.py").stderr
    assert "rank_main" not in done.err
    assert done.notes()[-1].startswith("ddpilot: rank 0 raised ValueError: bad sample (running `fail.py` on 1 rank on ")


@pytest.mark.timeout(120)
def test_run_gives_ranks_the_variables_of_torchrun_and_their_share_of_the_cores(tmp_path: Path) -> None:
    """Every variable that torchrun sets is there, with its value but for addresses and SIGUSR1; ddpilot finds them."""
    write(
        tmp_path,
        "look.py",
        "import json, os\nfrom ddpilot.environments.detect import detect_topology\n"
        "if os.environ['RANK'] == '0':\n"
        "    print(json.dumps({**os.environ, 'found': detect_topology(os.environ).environment}))\n",
    )
    mine = said_by_rank_zero(run(tmp_path, "-n", 2, "look.py", OMP_NUM_THREADS=""))
    with started([*TORCHRUN, "--standalone", "--nproc-per-node", 2, "look.py"], tmp_path) as process:
        theirs = json.loads(next(line for line in finish(process).out.splitlines() if line.startswith("{")))
    told = {name for name in theirs if name not in environment()} - {"found"}
    assert told <= set(mine)
    signals = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    assert mine[signals] == theirs[signals] + ",SIGUSR1"  # which schedulers send before the time is up
    different = {name for name in told - {signals} if mine[name] != theirs[name]}
    assert different <= {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
    assert mine["MASTER_ADDR"] == "127.0.0.1"
    assert (mine["found"], theirs["found"]) == ("ddpilot", "torchrun")
    assert int(mine["OMP_NUM_THREADS"]) >= 1
