# SPDX-License-Identifier: Apache-2.0
"""The environment is torchrun's, and groups can be made in it again and again, on loopback alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import ddpilot
from ddpilot import Launcher, LaunchError, RankError
from tests.dist.launching.scripts import run_script

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
DUMP = "import json, os\nopen('rank' + os.environ['RANK'], 'w').write(json.dumps(dict(os.environ)))\n"
# What torchrun sets for itself: its watchdog's files and sizes of retired features.
NOT_OF_THE_CONTRACT = ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE")


def environ() -> dict[str, str]:
    """The rank's environment."""
    return dict(os.environ)


def test_launch_sets_every_variable_that_torchrun_sets(tmp_path: Path) -> None:
    """ "Environment = torchrun's contract": the same names with the same values, but for ids, ports and threads."""
    run_script(DUMP, tmp_path, module=TORCHRUN)
    ours = Launcher(nproc_per_node=2).run(environ)
    for rank in range(2):
        theirs = json.loads((tmp_path / f"rank{rank}").read_text())
        added = set(theirs) - set(os.environ) - set(NOT_OF_THE_CONTRACT)
        assert added - set(ours[rank]) == set()
        free = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "OMP_NUM_THREADS"}
        same = sorted(name for name in added - free)
        assert {name: ours[rank][name] for name in same} == {name: theirs[name] for name in same}
        assert ours[rank]["MASTER_ADDR"] == "127.0.0.1"
        assert ours[rank]["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores() // 2)))


def num_cores() -> int:
    """Cores that this process may use: torchrun gives each rank one thread, and `launch` its part of the cores."""
    return len(os.sched_getaffinity(0))


def meet(address: tuple[str, str] | None) -> list[float]:
    """Make and destroy a group three times, as a cell that is run again does; tutorials set the address themselves."""
    import torch
    import torch.distributed as dist

    if address is not None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seen = []
    for number in range(3):
        dist.init_process_group("gloo", rank=rank, world_size=size)
        total = torch.tensor(float(rank + number))
        dist.all_reduce(total)
        dist.destroy_process_group()
        seen.append(float(total))
    return seen


@pytest.mark.parametrize("address", [None, ("localhost", "12355")], ids=["as_found", "tutorial"])
def test_launch_lets_user_code_init_destroy_and_init_again(address: tuple[str, str] | None) -> None:
    """ "User code may call `init_process_group()` ... also init, destroy and init again", without a barrier."""
    assert list(Launcher(nproc_per_node=2, timeout_s=30).run(meet, address)) == [[1.0, 3.0, 5.0]] * 2


def test_launch_lets_init_group_and_torch_take_turns() -> None:
    """ "User code may call `init_process_group()`, `init_group()`" in any order in one rank."""

    def both() -> list[float]:
        import torch
        import torch.distributed as dist

        seen = []
        for number in range(4):
            group = ddpilot.init_group() if number % 2 else None
            if group is None:
                dist.init_process_group("gloo")
            total = torch.tensor(float(number))
            dist.all_reduce(total)
            seen.append(float(total))
            if group is None:
                dist.destroy_process_group()
            else:
                group.leave()
        return seen

    assert list(Launcher(nproc_per_node=2, timeout_s=30).run(both)) == [[0.0, 2.0, 4.0, 6.0]] * 2


def test_launch_listens_on_loopback_alone() -> None:
    """ "All listening sockets of store and ranks are on 127.0.0.1" while a group is up."""

    def listening() -> list[str]:
        import psutil
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()
        server = psutil.Process(os.getppid())
        processes = [server, *server.children(recursive=True)]
        assert len(processes) == 4, "server, store and two ranks"
        addresses = [
            connection.laddr.ip
            for process in processes
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        dist.barrier()
        dist.destroy_process_group()
        return addresses

    found = Launcher(nproc_per_node=2, timeout_s=30).run(listening)[0]
    assert set(found) == {"127.0.0.1"}
    assert len(found) >= 3, "the store and gloo's two"


def test_launch_passes_the_backend_to_init_group() -> None:
    """`backend=` is what `init_group()` uses where it is given none."""

    def backend() -> str:
        with ddpilot.init_group() as group:
            return group.backend

    assert list(Launcher(nproc_per_node=2, backend="cpu:gloo").run(backend)) == ["cpu:gloo"] * 2


def test_launch_refuses_to_launch_inside_a_rank() -> None:
    """The error advises to call the function directly; nothing hangs, no process is left."""

    def nested() -> Any:
        return ddpilot.launch(environ, nproc_per_node=2)

    with pytest.raises(RankError, match=r"this process is itself rank \d of 2 \(started by ddpilot\)") as caught:
        Launcher(nproc_per_node=2).run(nested)
    assert isinstance(caught.value.__cause__, LaunchError)


def test_launch_refuses_to_launch_inside_torchrun(tmp_path: Path) -> None:
    """The same for a script under torchrun."""
    source = "import ddpilot\ndef train(): ...\nddpilot.launch(train, nproc_per_node=2)\n"
    outcome = run_script(source, tmp_path, module=TORCHRUN, may_fail=True)
    assert "of 2 (started by torchrun). Call `train` directly: every rank runs this code" in outcome.err
