# SPDX-License-Identifier: Apache-2.0
"""`%ddp start`, `restart` and `stop` in a real Jupyter kernel, and what is left when the kernel ends."""

from __future__ import annotations

import re

import psutil
import pytest

from benchmarks.leftovers import settle
from tests.notebook.kernels import Kernel, kernel_with_ranks

pytestmark = pytest.mark.timeout(120)


def pids(kernel: Kernel) -> dict[int, int]:
    """Process ids by rank."""
    return {rank: int(lines[0]) for rank, lines in kernel.run("%%ddp\nimport os; os.getpid()").by_rank.items()}


def gone(*wanted: int) -> list[str]:
    """Those of the processes that are not gone within the time that is promised."""
    return settle(lambda: [str(pid) for pid in wanted if psutil.pid_exists(pid)], grace_s=2.0)


def check_options(kernel: Kernel) -> None:
    """Environment, output and apps reach the ranks; invalid options are explained, and start nothing."""
    kernel.run("%ddp start -n 1 --env GREETING='good day' --output rank_zero")
    assert kernel.run("%%ddp\nimport os; print(os.environ['GREETING'])").stdout == "good day\n"
    kernel.run("%ddp stop")
    for line, found in (
        ("%ddp start -n some", "LaunchError: reading `nproc_per_node`: 'some'"),
        ("%ddp start --gpus x", "UsageError: reading `%ddp start`: argument --gpus: 'x' is not a list of ranks"),
        ("%ddp start --app no_such_app", "no_such_app"),
        ("%ddp start --preload no_such_module", "no_such_module"),
    ):
        failed = kernel.run(line)
        assert found in failed.error, (line, failed.outputs)
        assert len(failed.error.splitlines()) < 25, failed.error
    assert "no ranks are running" in kernel.run("%%ddp\n1").error


def test_ranks_are_restarted_one_by_one_and_all_together() -> None:
    """Rank numbers and the other ranks' variables are kept; a dead rank is named; a session can be replaced."""
    with kernel_with_ranks() as kernel:
        kernel.run("%%ddp\nkept = rank")
        first = pids(kernel)

        assert kernel.run("%ddp restart 1").stdout.endswith("ddpilot: rank 1 restarted, with no variables\n")
        second = pids(kernel)
        assert (second[0] == first[0], second[1] == first[1]) == (True, False)
        assert kernel.run("%%ddp\n'kept' in globals(), rank").by_rank == {0: ["(True, 0)"], 1: ["(False, 1)"]}

        died = kernel.run("%%ddp\nimport os, signal\nif rank == 0: os.kill(os.getpid(), signal.SIGKILL)")
        assert "RankError: rank 0 was killed by SIGKILL" in died.stderr
        assert died.error_name == "RankError"
        assert "rank 0 is dead" in kernel.run("%%ddp --ranks 0\n1").error
        again = kernel.run("%ddp start -n 2").stdout
        assert again == "ddpilot: 2 ranks already running, with their variables; rank 0 died: `%ddp restart 0`\n"
        kernel.run("%ddp restart")
        third = pids(kernel)
        assert not set(third.values()) & {*first.values(), *second.values()}

        said = kernel.run("%ddp auto on\n%ddp stop").stdout.splitlines()
        assert said[-1] == "ddpilot: stopped 2 ranks; auto is off"
        assert gone(*third.values()) == []
        assert "no ranks are running. Type `%ddp start -n 2` first" in kernel.run("%%ddp\n1").error
        check_options(kernel)
        assert re.match(r"ddpilot: 3 ranks ready in \d+\.\d s\n", kernel.run("%ddp start -n 3 --seed 5").stdout)
        drawn = kernel.run("%%ddp\nimport random; random.random()").by_rank
        assert len({lines[0] for lines in drawn.values()}) == 1
        assert len(drawn) == 3
        last = pids(kernel)
    assert gone(*last.values()) == [], "ranks outlive their notebook"
