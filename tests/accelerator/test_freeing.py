# SPDX-License-Identifier: Apache-2.0
"""Entering, freeing and leaving a group on the emulated accelerator, in ranks of a launch and of `ddpilot run`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddpilot import Launcher
from tests.accelerator import SITE, environment, why_not
from tests.accelerator.bodies import free_while_waiting, train
from tests.dist.run.commands import run
from tests.preload import PRELOAD
from tests.soak import often

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")


@pytest.fixture(autouse=True)
def site_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks find modules where this process does: the device as if it were installed. Here torch is loaded already."""
    monkeypatch.syspath_prepend(str(SITE))


def expected(num_ranks: int) -> list[float]:
    """The weights that plain PyTorch gives on one process with the mean of all ranks' losses."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        losses = [
            net(torch.full((2, 4), rank + number + 1.0, dtype=torch.float64)).square().mean()
            for rank in range(num_ranks)
        ]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [float(each) for each in net.weight.detach().flatten()]


@often("4")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_launch_trains_on_one_device_per_rank_with_the_cpus_numbers(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device and backend are found by what torch registers, without a word about them."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # torch's optimizers would set it
    found = Launcher(nproc_per_node=num_ranks, env=environment(num_ranks), timeout_s=100, preload=PRELOAD).run(train)
    assert [each["device"] for each in found] == [f"emu:{rank}" for rank in range(num_ranks)]
    assert {each["backend"] for each in found} == {"cpu:gloo,emu:eccl"}
    for each in found:
        assert each["weights"] == pytest.approx(expected(num_ranks), rel=1e-10)


def test_freeing_lets_a_wait_for_the_device_return_and_no_step_is_taken_with_what_came(tmp_path: Path) -> None:
    """`item()` returns without an error, as with NCCL; the next step and the next collective raise."""
    launcher = Launcher(nproc_per_node=2, env=environment(2), timeout_s=100, preload=PRELOAD)
    said = launcher.run(free_while_waiting, tmp_path / "done")[0]
    assert said[0] == "item returned"
    assert said[1] == "aborted ('0',), stuck ()"
    assert "GroupError: [rank 0] taking a step of an optimizer: the process group was freed" in said[2]
    assert "communicator was aborted" in said[3]


def test_ranks_that_share_a_device_are_refused_where_gloo_cannot_take_it() -> None:
    """Two ranks and one device: said before anything starts on it, with what to do."""
    with pytest.raises(Exception, match="several ranks share one|share"):
        Launcher(nproc_per_node=2, env=environment(1), timeout_s=100, preload=PRELOAD).run(train)


SCRIPT = """
import torch, ddpilot
with ddpilot.init_group() as group:
    ones = torch.ones(1, device=group.device)
    group.all_reduce(ones)
    print("sum", ones.item(), group.device, group.backend)
"""


def test_run_starts_ranks_on_the_device(tmp_path: Path) -> None:
    """`ddpilot run` needs no option for it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(tmp_path, "-n", 2, "script.py", **environment(2))
    assert done.code == 0, done
    for rank in range(2):
        assert f"sum 2.0 emu:{rank} cpu:gloo,emu:eccl" in done.out
