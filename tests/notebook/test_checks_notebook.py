# SPDX-License-Identifier: Apache-2.0
"""`%ddp doctor FUNCTION` and `%ddp verify` in a real Jupyter kernel: functions of the notebook and of the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook.kernels import Kernel, kernel_with_ranks

pytestmark = pytest.mark.timeout(150)

IMPORTS = """
import torch, ddpilot
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
"""
FUNCTION = """
def {name}(epochs=1):
    with ddpilot.init_group("gloo"):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator))
        {sampler}
        for epoch in range(epochs):
            {each_epoch}
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
"""
RIGHT = {
    "sampler": "loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))",
    "each_epoch": "loader.sampler.set_epoch(epoch)",
}
WRONG = {"sampler": "loader = DataLoader(data, batch_size=4)", "each_epoch": "pass"}

VERIFIED = """
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
    """A kernel with two ranks; right and wrong functions are in the notebook, other wrong ones on the ranks."""
    with kernel_with_ranks() as kernel:
        assert kernel.run(IMPORTS).error == ""
        assert kernel.run("ddpilot.doctor(nproc_per_node=2, num_workers=0)").error == ""  # starts the server of ranks
        assert kernel.run(FUNCTION.format(name="right", **RIGHT)).error == ""
        assert kernel.run(FUNCTION.format(name="wrong", **WRONG)).error == ""
        assert kernel.run(VERIFIED.format(name="exact", factor=0)).error == ""
        there = FUNCTION.format(name="there", **WRONG) + VERIFIED.format(name="doubled", factor=1)
        made = kernel.run("%%ddp" + IMPORTS + there)
        assert made.failure == ""
        yield kernel


def test_a_function_of_the_notebook_passes_all_rungs(kernel: Kernel) -> None:
    """The line has the result as its value, as text and HTML."""
    cell = kernel.run("%ddp doctor -n 2 --updates 2 --workers 0 right(epochs=1)")
    assert cell.failure == ""
    (data,) = [each["data"] for each in cell.outputs if "data" in each]
    assert "doctor right, 2 ranks: all rungs are ok; " in data["text/plain"]
    assert "clean-up" in data["text/html"]
    assert "ddpilot: run 1: 1 rank, as it is" in cell.stdout
    assert kernel.run("%%ddp\nrank").by_rank == {0: ["0"], 1: ["1"]}


def test_the_checklist_has_the_line_of_the_cell(kernel: Kernel) -> None:
    """Lint reads all cells, since imports and functions are in different ones, and reports the function's."""
    cell = kernel.run(
        "found = %ddp doctor wrong -n 2 --workers 0\n"
        "point = [each for each in found.checklist if each.code][0]\n"
        "print(found.failed.letter, point.code, point.place.file.startswith('Cell In['), point.place.text)"
    )
    assert cell.error == ""
    assert cell.stdout.splitlines()[-1].startswith("e DDP401 True ")


def test_a_function_of_the_ranks_is_pulled(kernel: Kernel) -> None:
    """It is defined in a cell under %%ddp alone."""
    cell = kernel.run("found = %ddp doctor there -n 2 --workers 0\nfound.failed.letter, found.failed.findings[0].code")
    assert cell.error == ""
    assert cell.shown == ["('e', 'DDP401')"]


def test_function_of_the_notebook_is_equal(kernel: Kernel) -> None:
    """The line has the result as its value, as text and HTML; the session is not touched."""
    cell = kernel.run("%ddp verify exact -n 2 --updates 3")
    assert cell.failure == ""
    (data,) = [each["data"] for each in cell.outputs if "data" in each]
    assert "verify exact, 1 and 2 ranks: equal" in data["text/plain"]
    assert "3 updates of 1 and 2 ranks" in data["text/plain"]
    assert "<b>verify exact, 1 and 2 ranks: equal</b>" in data["text/html"]
    assert "ddpilot: run 1: 2 ranks, as it is" in cell.stdout
    assert kernel.run("%%ddp\nrank").by_rank == {0: ["0"], 1: ["1"]}


def test_function_of_the_ranks_is_pulled_and_its_fault_is_named(kernel: Kernel) -> None:
    """It is defined in a cell under %%ddp alone."""
    cell = kernel.run("found = %ddp verify doubled -n 2\nfound.verdict, found.findings[0].code")
    assert cell.error == ""
    assert cell.shown == ["('different', 'DDP823')"]


def test_names_that_cannot_be_verified_are_refused(kernel: Kernel) -> None:
    """A name that neither side has, and a value that is not a function."""
    assert "Did you mean `exact`?" in kernel.run("%ddp verify exakt").error
    assert "Did you mean `exact`?" in kernel.run("%ddp verify exakt(factor=1)").error
    kernel.run("number = 3")
    assert "`number` is int" in kernel.run("%ddp verify number").error
    assert "exact" in kernel.complete("%ddp verify exa")
