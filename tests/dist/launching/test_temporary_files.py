# SPDX-License-Identifier: Apache-2.0
"""What launches and sessions leave in the temporary directory, however they end: nothing."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import ddpilot
from ddpilot.errors import RankError
from tests.dist.launching.scripts import wait_until


def be_killed() -> None:
    """With a folder of multiprocessing's, as a process has that shares a tensor with a worker."""
    assert Path(multiprocessing.util.get_temp_dir()).is_dir()
    os.kill(os.getpid(), signal.SIGKILL)


def close_all() -> int:
    """As a program does that becomes a daemon."""
    os.closerange(3, 1000)
    return 5


def close_all_and_raise() -> None:
    """With an error that cannot be sent either."""
    os.closerange(3, 1000)
    raise ValueError("of the user")


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_killed_rank_leaves_no_folder_of_multiprocessing(start_method: str) -> None:
    """Python removes it at the exit of the process, which a killed one does not reach."""
    before = set(Path(tempfile.gettempdir()).glob("pymp-*"))
    with pytest.raises(RankError, match="SIGKILL"):
        ddpilot.Launcher(nproc_per_node=1, start_method=start_method).run(be_killed)  # type: ignore[arg-type]  # a str
    assert set(Path(tempfile.gettempdir()).glob("pymp-*")) <= before


@pytest.mark.parametrize(("function", "said"), [(close_all, "closerange"), (close_all_and_raise, "of the user")])
def test_a_function_that_closes_every_descriptor_is_told_so(function: object, said: str) -> None:
    """Without a traceback of ddpilot's own."""
    with pytest.raises(RankError) as raised:
        ddpilot.launch(function, nproc_per_node=1)  # type: ignore[arg-type]  # a function
    assert said in str(raised.value)
    assert raised.value.found.startswith("rank 0 closed the descriptor on which the outcome of `close_all")
    assert "os._exit" not in str(raised.value)
    assert "Close only what you opened" in str(raised.value)
    assert "rank.py" not in str(raised.value)


def test_a_session_that_is_killed_while_it_starts_leaves_no_folder(tmp_path: Path) -> None:
    """There is none before the process is there that removes it."""
    (tmp_path / "tmp").mkdir()
    # The rank server imports it, which lasts as long as the process that has started the server.
    (tmp_path / "slow.py").write_text(
        "import os, time\nopen('begun', 'w').close()\nparent = os.getppid()\n"
        "while os.getppid() == parent:\n    time.sleep(0.01)\nos._exit(1)\n"
    )
    code = "import ddpilot\nddpilot.Session(1, preload=('slow',), watch=False)\n"
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=env) as process:
        wait_until((tmp_path / "begun").exists, limit_s=60)
        made = [path for path in (tmp_path / "tmp").iterdir() if path.is_dir()]
        process.kill()
    assert made == []
