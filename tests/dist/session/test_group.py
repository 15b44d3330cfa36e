# SPDX-License-Identifier: Apache-2.0
"""The process group of a session: entered at the first use, or created by the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest

from ddpilot import RankError, Session
from ddpilot.session.protocol.messages import FREE, Free
from tests.dist.session.conftest import Kept

Start = Callable[..., Session]


@pytest.mark.parametrize(
    "use",
    [
        "group.barrier()",
        "dist.barrier()",
        "assert dist.get_rank() == rank and dist.get_world_size() == 2",
        "t = torch.ones(1); dist.all_reduce(t); assert t.item() == 2",
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))",
        "got = [None, None]; dist.all_gather_object(got, rank); assert got == [0, 1]",
        "dist.new_group([0, 1]).size()",
        "from torch.distributed.device_mesh import init_device_mesh; init_device_mesh('cpu', (2,))",
        "with group: group.broadcast_object(3)",
    ],
)
def test_the_first_use_enters_the_group(start: Start, use: str) -> None:
    """Without init_process_group, whatever needs the group first."""
    session = start(2)
    session.execute(f"import torch, torch.distributed as dist\nassert not dist.is_initialized()\n{use}")
    session.execute("assert dist.is_initialized()\ngroup.barrier()")


def test_a_group_created_by_the_user_is_adopted_left_and_created_again(start: Start, view: Kept) -> None:
    """init, destroy and init again, as tutorials do; afterwards the session enters a group automatically."""
    session = start(2)
    own = "import torch.distributed as dist\ndist.init_process_group('gloo')\nassert group.adopted\ngroup.barrier()"
    for _ in range(2):
        session.execute(own)
        session.execute("dist.barrier()")
        session.execute("dist.destroy_process_group()")
    session.execute("group.barrier(); assert not group.adopted")
    with pytest.raises(RankError, match="twice! The session enters the group at the first collective"):
        session.execute("dist.init_process_group('gloo')")
    session.execute("group.leave(); assert not group.is_entered")
    session.execute("dist.barrier()")


def test_the_sessions_names_come_back(start: Start, view: Kept) -> None:
    """In the next cell after `del` and `%reset`; a `rank` that a loop has overwritten is reported once."""
    session = start(2)
    session.execute("for rank in range(world_size): pass")
    said = "ddpilot: `rank` is now 1, it was 0: `del rank` restores the session's value in the next cell\n"
    assert view.texts == {0: said}
    session.execute("rank = 5; del device, group")
    session.execute("assert rank == 5; group.barrier(); device.type; del rank")
    assert session.pull("rank") == [0, 1]
    session.execute("%reset -f")
    assert session.pull("(rank, world_size)") == [(0, 2), (1, 2)]


def test_a_failure_on_the_way_into_the_group_does_not_spoil_the_next_try(start: Start) -> None:
    """One rank raises before init_process_group while the other waits in it; both enter in the next cell."""
    session = start(2)
    with pytest.raises(RankError, match="rank 1 raised ValueError: too early"):
        session.execute(
            "import torch.distributed as dist\nif rank == 1: raise ValueError('too early')\n"
            "dist.init_process_group('gloo')"
        )
    session.execute("if not dist.is_initialized(): dist.init_process_group('gloo')\ndist.barrier()")


def test_a_group_that_the_user_left_is_not_rebuilt_after_a_failure(start: Start, view: Kept) -> None:
    """The user can then create the next one."""
    session = start(2)
    session.execute("import torch.distributed as dist\ndist.init_process_group('gloo'); dist.barrier()")
    session.execute("dist.destroy_process_group()")
    with pytest.raises(RankError, match="NameError"):
        session.execute("no_such_name")
    session.execute("assert not dist.is_initialized(); dist.init_process_group('gloo'); dist.barrier()")
    assert view.notes == []


def test_entering_from_a_cell_on_some_ranks_is_refused_with_what_to_do(start: Start) -> None:
    """It would wait for ranks that do not run the cell."""
    session = start(3)
    with pytest.raises(RankError, match="this cell runs on ranks 0,2 only, but rank 1 must enter it too") as caught:
        session.execute("group.barrier()", ranks=[0, 2])
    assert "Run this cell on all ranks" in str(caught.value)
    session.execute("import ddpilot\nwith ddpilot.init_group() as own: own.barrier()")
    with pytest.raises(RankError, match="this cell runs on rank 0 only, but ranks 1,2 must enter it too"):
        session.execute("ddpilot.init_group()", ranks=[0])
    session.execute("group.barrier()")
    session.execute("import torch.distributed as dist; assert dist.get_world_size() == 3", ranks=[0])


def test_seed_and_backend_reach_every_rank(start: Start, view: Kept) -> None:
    """The same numbers on all ranks with a seed, different ones without."""
    code = "import torch; print(torch.rand(1).item())"
    start(2, seed=5, backend="gloo").execute(code)
    assert view.texts[0] == view.texts[1]
    view.texts.clear()
    start(2).execute(code)
    assert view.texts[0] != view.texts[1]


def test_every_collective_is_in_the_rings_with_its_cell_line(start: Start) -> None:
    """Collectives are recorded with the line of the cell."""
    from ddpilot.record.flight_ring.reader import read_ring
    from ddpilot.record.hook import find_rings

    session = start(2)
    session.execute("import torch\ntensor = torch.ones(3)\ngroup.all_reduce(tensor)", cell=9)
    rings = find_rings(session._kernels.ring_folder)
    assert set(rings) == {0, 1}
    for path in rings.values():
        entry = next(each for each in read_ring(path).collectives if each.op == "all_reduce")
        assert entry.line is not None
        assert "Cell In[9]" in str(entry.line)


def test_freeing_a_rank_on_its_way_into_the_group_shows_nothing_of_torchs_own(start: Start, view: Kept) -> None:
    """Its store logs the connection that ddpilot has closed, with C++ frames; the cell's own output is shown."""
    session = start(2)
    with pytest.raises(RankError, match="ZeroDivisionError"):
        session.execute("import os\ntry: 1/0 if rank else group.barrier()\nfinally: os.write(2, b'mine\\n')")
    session.execute("group.barrier()")
    assert view.raws == {0: b"mine\n", 1: b"mine\n"}


def test_a_rank_that_is_freed_too_late_keeps_its_new_group(start: Start) -> None:
    """On a busy machine the request to free a rank may arrive after the group was rebuilt."""
    session = start(2)
    with pytest.raises(RankError, match="ZeroDivisionError"):
        session.execute("1/0 if rank else group.barrier()")
    session.execute("group.barrier()")
    for rank in range(2):
        session._kernels.io_thread.send([rank], "control", FREE, asdict(Free(generation=0, interrupt=False)))
    for _ in range(5):
        session.execute("group.barrier()")


def test_models_that_differ_are_named_wherever_they_are_held(start: Start, view: Kept) -> None:
    """In a dictionary, in an object, and in no variable at all."""
    session = start(2)
    session.execute(
        "import torch, types\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
        "models = {'d': DDP(torch.nn.Linear(2, 2))}\n"
        "trainer = types.SimpleNamespace(net=DDP(torch.nn.Bilinear(2, 2, 1)))\n"
        "def hold(model):\n    return lambda: model\n"
        "held = hold(DDP(torch.nn.Embedding(3, 2)))\n"
        "same = DDP(torch.nn.Linear(3, 3))"
    )
    with pytest.raises(RankError, match="boom"):
        session.execute(
            "group.barrier()\nfor _each in (models['d'], trainer.net, held()):\n"
            "    if rank: next(_each.parameters()).data += 0.5\n"
            "if rank: raise ValueError('boom')"
        )
    said = "\n".join(view.notes)
    for what in ("`models['d']` (Linear)", "`trainer.net` (Bilinear)", "a model of class Embedding in no variable"):
        assert f"{what} differs in 1 of " in said, said
    assert said.count("rank 0 against rank 1, by up to 0.5") == 3, said
    assert "`for p in models['d'].parameters(): group.broadcast(p.data)`" in said
    assert "same" not in said.replace("the same", "")
