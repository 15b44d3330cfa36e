# SPDX-License-Identifier: Apache-2.0
"""Sessions whose ranks have an emulated accelerator: what they wait for is on the device, and errors come late."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddpilot import LaunchInterrupted, RankError, Session
from tests.accelerator import SITE, environment, why_not
from tests.accelerator.sessions import HEALTHY, LIMIT_S, MODEL, draw_faults, suffer
from tests.dist.launching.scripts import wait_until
from tests.dist.session.conftest import Kept
from tests.soak import IS_SOAK, soak

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")

PATIENCE = 1.0 if IS_SOAK else 4.0
LATE_WATCHDOG, EAGER_WATCHDOG = {"EMU_WATCH_INTERVAL_MS": "3600000"}, {"EMU_WATCH_INTERVAL_MS": "10"}
"""Whether the program or the backend's watchdog meets an error of the device first."""
NUM_PARTS, PART = 9, 6
FAULTS = {part: draw_faults(PART, 2 + 2 * (part % 2), seed=part) for part in range(NUM_PARTS)}
"""54 faults, on 2 and on 4 ranks in turn; each part has every kind."""


@pytest.fixture(autouse=True)
def site_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks find modules where this process does: the device as if it were installed."""
    assert torch.__version__  # is loaded here: this process is to have no device
    monkeypatch.syspath_prepend(str(SITE))


@pytest.fixture
def view() -> Kept:
    """What the ranks of the test said."""
    return Kept()


@pytest.fixture
def session(view: Kept) -> Iterator[Session]:
    """Two ranks with a device each."""
    with Session(2, env=environment(2), view=view) as started:
        yield started


def pressing(session: Session, after_s: float) -> threading.Timer:
    """Press stop so many seconds from now."""
    button = threading.Timer(after_s, session.interrupt)
    button.start()
    return button


def test_ranks_have_their_device_and_collectives_on_it_and_on_the_cpu(session: Session) -> None:
    """As with CUDA: a backend for each, a communicator that is there with the group, and a subset of ranks."""
    session.execute(
        "import torch, torch.distributed as dist\nsums = {}\n"
        "for where in (device, 'cpu'):\n    ones = torch.ones(3, device=where)\n    dist.all_reduce(ones)\n"
        "    sums[str(where)] = ones.sum().item()\n"
        "alone, one = dist.new_group([0]), torch.ones(1, device=device)\n"
        "if rank == 0:\n    dist.all_reduce(one, group=alone)\n"
        "group.barrier()"
    )
    assert session.pull("sums") == [{"emu:0": 6.0, "cpu": 6.0}, {"emu:1": 6.0, "cpu": 6.0}]
    assert session.pull("one.item()") == [1.0, 1.0]
    assert session.pull("dist.group.WORLD.bound_device_id == device") == [True, True]
    assert all("emu:eccl" in text for text in session.pull("str(dist.distributed_c10d.get_backend_config())"))


def test_ranks_that_wait_for_the_device_are_freed_when_another_raises(
    session: Session, view: Kept, tmp_path: Path
) -> None:
    """The host waits in `item()`, behind an all_reduce of which it knows nothing; no rank dies, all train on."""
    session.execute(MODEL + "step().item(); kept = rank")
    waits = tmp_path / "waits"

    def tell_once_rank_0_waits() -> None:
        try:
            wait_until(lambda: session.status()[0].collective is not None, limit_s=30)
        finally:
            waits.touch()

    teller = threading.Thread(target=tell_once_rank_0_waits)
    teller.start()
    began_s = time.monotonic()
    with pytest.raises(RankError, match="rank 1 raised ValueError: boom"):
        session.execute(
            f"if rank == 1:\n    while not os.path.exists({str(waits)!r}):\n        time.sleep(0.01)\n"
            "    raise ValueError('boom')\nstep(); went_on = step().item()"
        )
    teller.join()
    session.execute(HEALTHY + "assert kept == rank and 'went_on' not in globals()")
    assert time.monotonic() - began_s < LIMIT_S * PATIENCE
    assert not [note for note in view.notes if note.startswith("killing")]
    assert any("1 DDP model bound to it" in note for note in view.notes)
    assert any("aborted on the devices of rank" in note and "load a checkpoint" in note for note in view.notes)


def test_a_first_collective_that_one_rank_makes_alone_costs_no_rank(session: Session, view: Kept) -> None:
    """The commonest hang of notebooks: the communicator is there already, and can be aborted."""
    button = pressing(session, 3.0)
    with pytest.raises(LaunchInterrupted):
        session.execute(
            "import torch, torch.distributed as dist\ngroup.process_group\nif rank == 0:\n"
            "    one = torch.ones(1, device=device)\n    dist.all_reduce(one)\n    one.item()"
        )
    button.join()
    session.execute("one = torch.ones(1, device=device); dist.all_reduce(one); assert one.item() == 2")
    assert not [note for note in view.notes if note.startswith("killing")]


def test_groups_that_wait_for_each_other_are_all_freed(session: Session, view: Kept) -> None:
    """Aborting one communicator waits for the kernels of the others, which end when those are aborted as well."""
    session.execute(
        MODEL + "groups = [dist.new_group() for _ in range(3)]\nfor each in groups:\n"
        "    dist.all_reduce(torch.ones(1, device=device), group=each)\nstep().item()"
    )
    button = pressing(session, 1.0)
    with pytest.raises(LaunchInterrupted):
        session.execute(
            "if rank == 0:\n    for each in groups:\n        with torch.Stream(device=device):\n"
            "            dist.all_reduce(torch.ones(1, device=device), group=each, async_op=True)\n"
            "    torch.accelerator.synchronize()"
        )
    button.join()
    session.execute(HEALTHY)
    assert not [note for note in view.notes if note.startswith("killing")]


def test_a_device_that_fails_for_good_is_named_and_its_rank_can_be_restarted(view: Kept) -> None:
    """As after an assertion in a kernel: the rank lives and can be pulled from, but no group is made with it."""
    with Session(2, env=environment(2) | LATE_WATCHDOG, view=view) as session:
        session.execute(MODEL + "step().item(); kept = [rank]")
        with pytest.raises(RankError, match="rank 1 raised"):
            session.execute(
                "import sys\nif rank == 1:\n    sys.modules['emu_C'].set_device_error(1, 'assertion in a kernel')\n"
                "step().item()"
            )
        assert any("rank 1: its device has failed and accepts no more work" in note for note in view.notes)
        assert session.pull("kept") == [[0], [1]]
        with pytest.raises(RankError, match=r"rank 1 cannot use its device; restart it \(`%ddp restart 1`"):
            session.execute("dist.barrier()")
        began_s = time.monotonic()
        session.restart(1)
        session.execute(MODEL + HEALTHY)
        assert time.monotonic() - began_s < LIMIT_S * PATIENCE
        assert session.pull("kept", rank=0) == [0]


def test_a_device_that_fails_for_good_is_replaced_where_ranks_are_respawned(view: Kept) -> None:
    """`respawn` restarts such a rank as it does a dead one."""
    with Session(2, env=environment(2) | LATE_WATCHDOG, view=view, respawn=True) as session:
        session.execute(MODEL + "step().item()")
        with pytest.raises(RankError, match="rank 0 raised"):
            session.execute(
                "import sys\nif rank == 0:\n    sys.modules['emu_C'].set_device_error(0, 'lost')\nstep().item()"
            )
        session.execute(MODEL + HEALTHY)
    assert any("rank 0 restarted (`respawn`)" in note for note in view.notes)


def test_a_rank_whose_watchdog_meets_the_error_of_its_device_first_is_aborted_and_replaced(view: Kept) -> None:
    """As NCCL's does where a collective is in flight: it ends the process, whatever the program does meanwhile."""
    with Session(2, env=environment(2) | EAGER_WATCHDOG, view=view, respawn=True) as session:
        session.execute(MODEL + "step().item()")
        with pytest.raises(RankError, match=r"rank 0 was aborted \(SIGABRT\)"):
            session.execute(
                "import sys\nif rank == 0:\n    dist.all_reduce(torch.ones(1, device=device), async_op=True)\n"
                "    sys.modules['emu_C'].set_device_error(0, 'lost')\ntime.sleep(1000)"
            )
        session.execute(MODEL + HEALTHY)
    assert any("rank 0 restarted (`respawn`)" in note for note in view.notes)


@soak
@pytest.mark.timeout(170)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_faults_cost_no_rank_and_ranks_train_on_within_seconds(part: int) -> None:
    """A rank raises, is late, skips a step, is killed, hangs or is stopped, at any point of a loop on the device."""
    num_ranks = 2 + 2 * (part % 2)
    with Session(num_ranks, env=environment(num_ranks), view=Kept()) as session:
        session.execute(MODEL)
        for fault in FAULTS[part]:
            took_s = suffer(session, fault)
            assert took_s < LIMIT_S, f"{fault}: {took_s:.1f} s"


def test_random_faults_are_the_same_each_time_and_of_every_kind() -> None:
    """A failure can be repeated."""
    for part, faults in FAULTS.items():
        assert draw_faults(PART, 2 + 2 * (part % 2), seed=part) == faults
        assert {fault.kind for fault in faults} == {"raise", "late", "skip", "kill", "stop", "hang"}


def test_a_cell_is_interrupted_before_the_wait_that_freeing_ends_returns(session: Session, view: Kept) -> None:
    """`item()` returns without an error once the collective is aborted; its number reaches no line of the cell."""
    # The first two steps agree on DDP's buckets, for which the host waits in the forward pass.
    session.execute(MODEL + "for _ in range(4): step().item()\nseen = []")
    with pytest.raises(RankError, match="rank 1 raised ValueError: boom"):
        session.execute(
            "if rank == 1:\n    time.sleep(1)\n    raise ValueError('boom')\nloss = step()\nseen.append(loss.item())"
        )
    assert session.pull("seen") == [[], []]
    began_s = time.monotonic()
    session.execute(HEALTHY)
    assert time.monotonic() - began_s < 10
    assert not [note for note in view.notes if note.startswith("killing")]
