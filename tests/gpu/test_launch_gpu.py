# SPDX-License-Identifier: Apache-2.0
"""Launching where there is a GPU: run wherever one is present, skipped with the reason where there is none."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import ddpilot
from ddpilot import Launcher, LaunchInterrupted, LaunchTimeoutError, RankError
from ddpilot.environments.nvml import count_accelerators
from tests.dist.launching.scripts import run_script, wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_accelerators(os.environ) == 0, reason="no NVIDIA device is visible to NVML here"),
]


def reduce_once() -> dict[str, Any]:
    """Enter a group on the rank's device, all-reduce once, say where that was."""
    import torch
    import torch.distributed as dist

    with ddpilot.init_group() as group:
        total = torch.full((4,), float(group.rank + 1), device=group.device)
        dist.all_reduce(total)
        return {"total": float(total[0]), "device": str(group.device), "backend": group.backend, "tensor": total}


def used_bytes() -> int:
    """Memory in use on the first visible GPU, that of other processes included."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return total - free


AFTER_CUDA = """
import torch, ddpilot
weight = torch.ones(500, 500, device="cuda", requires_grad=True)
(weight @ weight).sum().backward()
from tests.gpu.test_launch_gpu import reduce_once
value = ddpilot.Launcher(nproc_per_node=1).run(reduce_once)[0]
print(value["total"], value["device"], value["backend"], value["tensor"].device)
"""


def test_launch_works_after_cuda_was_used_in_the_parent(tmp_path: Path) -> None:
    """A matmul and a backward on the GPU in the parent, then one rank with nccl; its CUDA tensor comes back on host."""
    root = str(Path(__file__).parents[2])
    outcome = run_script(AFTER_CUDA, tmp_path, env={"PYTHONPATH": root}, limit_s=110)
    total, device, backend, returned = outcome.out.splitlines()[-1].split()
    assert (total, device, returned) == ("1.0", "cuda:0", "cpu")
    assert "nccl" in backend


def test_two_ranks_share_one_gpu_over_gloo(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """NCCL refuses that; gloo does it, and it is said."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    values = Launcher(nproc_per_node=2, backend="gloo", timeout_s=100).run(reduce_once)
    assert [(value["total"], value["device"]) for value in values] == [(3.0, "cuda:0")] * 2
    assert "2 ranks on 1 GPU: `init_group()` uses gloo" in capfd.readouterr().err


def test_neither_import_nor_launch_nor_server_makes_a_cuda_context(tmp_path: Path) -> None:
    """The parent never initialises CUDA, and the server proves that it did not; the rank then can."""
    source = (
        "import ddpilot, torch\n"
        "from ddpilot.launching.rank_server.fork_safety import cuda_driver_in_use\n"
        "def train():\n"
        "    before = cuda_driver_in_use()\n"
        "    return before, float(torch.ones(3, device='cuda').sum())\n"
        "print(ddpilot.launch(train)[0], cuda_driver_in_use(), torch.cuda.is_initialized())\n"
    )
    assert run_script(source, tmp_path, limit_s=110).out == "(False, 3.0) False False\n"


def test_a_preloaded_module_that_touches_cuda_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """ "Proves that it is clean before it is used": the module is blamed, and the spawned rank can use CUDA."""
    (tmp_path / "touches_cuda.py").write_text("import torch\ntorch.ones(1, device='cuda')\n")

    def on_gpu() -> float:
        import torch

        return float(torch.ones(3, device="cuda").sum())

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        assert list(Launcher(nproc_per_node=1, preload=("touches_cuda",)).run(on_gpu)) == [3.0]
    assert "importing `touches_cuda` initialised the CUDA driver" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["raises", "timeout"])
def test_memory_of_a_stopped_group_is_free_within_two_seconds(how: str) -> None:
    """2 GB are on the GPU when the launch fails or is stopped; two seconds later they are free."""

    def hold(how: str) -> None:
        import torch

        held = torch.ones(500_000_000, device="cuda")
        torch.cuda.synchronize()
        if how == "raises":
            raise ValueError(f"holding {held.nbytes} bytes")
        time.sleep(600)

    before = used_bytes()
    with pytest.raises((RankError, LaunchTimeoutError, LaunchInterrupted)):
        Launcher(nproc_per_node=1, timeout_s=20, output="silent").run(hold, how)
    wait_until(lambda: used_bytes() < before + 200_000_000, limit_s=2.0)
