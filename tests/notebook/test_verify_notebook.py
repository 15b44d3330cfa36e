# SPDX-License-Identifier: Apache-2.0
"""`%ddp verify` in a real Jupyter kernel: functions of the notebook and of the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook.kernels import Kernel, kernel_with_ranks

pytestmark = pytest.mark.timeout(120)

FUNCTION = """
def {name}(factor={factor}):
    import torch, ddpilot
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    with ddpilot.init_group("gloo") as group:
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
        for x, y in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            (loss * group.world_size if factor else loss).backward()
            optimizer.step()
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A kernel with two ranks; the right function is in the notebook, the wrong one on the ranks."""
    with kernel_with_ranks() as kernel:
        assert kernel.run(FUNCTION.format(name="right", factor=0)).error == ""
        made = kernel.run("%%ddp" + FUNCTION.format(name="wrong", factor=1))
        assert made.error + made.stderr == ""
        # Starts the server of the ranks, which stays for the next launch.
        assert kernel.run("import time, ddpilot; ddpilot.launch(time.monotonic, nproc_per_node=1)").error == ""
        yield kernel


def test_function_of_the_notebook_is_equal(kernel: Kernel) -> None:
    """The line has the result as its value, as text and HTML; the session is not touched."""
    cell = kernel.run("%ddp verify right -n 2 --updates 3")
    assert cell.error + cell.stderr == ""
    (data,) = [each["data"] for each in cell.outputs if "data" in each]
    assert "verify right, 1 and 2 ranks: equal" in data["text/plain"]
    assert "3 updates of 1 and 2 ranks" in data["text/plain"]
    assert "<b>verify right, 1 and 2 ranks: equal</b>" in data["text/html"]
    assert "ddpilot: run 1: 2 ranks, as it is" in cell.stdout
    assert kernel.run("%%ddp\nrank").by_rank == {0: ["0"], 1: ["1"]}


def test_function_of_the_ranks_is_pulled_and_its_fault_is_named(kernel: Kernel) -> None:
    """It is defined in a cell under %%ddp alone."""
    cell = kernel.run("found = %ddp verify wrong -n 2\nfound.verdict, found.findings[0].code")
    assert cell.error == ""
    assert cell.shown == ["('different', 'DDP823')"]


def test_names_that_cannot_be_verified_are_refused(kernel: Kernel) -> None:
    """A name that neither side has, and a value that is not a function."""
    assert "Did you mean `right`?" in kernel.run("%ddp verify rigth").error
    assert "Did you mean `right`?" in kernel.run("%ddp verify rigth(factor=1)").error
    kernel.run("number = 3")
    assert "`number` is int" in kernel.run("%ddp verify number").error
    assert "right" in kernel.complete("%ddp verify ri")
