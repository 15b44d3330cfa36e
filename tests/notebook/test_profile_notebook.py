# SPDX-License-Identifier: Apache-2.0
"""`%%ddp --profile` in a real Jupyter kernel: raw DDP, a `Loop` and a `Trainer` in the cell, errors, and no updates."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.notebook.kernels import Cell, Kernel, kernel_with_ranks

pytestmark = pytest.mark.timeout(180)

MODEL = """%%ddp
import time, torch, ddpilot
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(320, 8), torch.randint(2, (320,)))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

RAW = """%%ddp --profile
for x, y in loader:
    time.sleep(0.01 * rank)
    cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

LOOP = """%%ddp --profile found
loop = ddpilot.Loop(seed=0)
net = torch.nn.Linear(8, 2)
net, adam = loop.prepare(net, torch.optim.Adam(net.parameters()))
for x, y in loop.batches(loop.loader(data, global_batch_size=16)):
    loop.backward(cross_entropy(net(x), y))
    loop.step(adam)
"""

TRAINER = """%%ddp --profile
trainer = ddpilot.Trainer(torch.nn.Linear(8, 2), cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1))
trainer.fit(data, epochs=1, global_batch_size=16, progress=False)
"""

FAILING = """%%ddp --profile
for step, (x, y) in enumerate(loader):
    cross_entropy(model(x), y).backward()
    optimizer.step()
    if step == 7:
        raise ValueError("planted")
"""

HOOKS = """%%ddp
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import dataloader as torch_loader
from ddpilot.data.local_batch import observers
print(
    len(torch.nn.modules.module._global_forward_hooks), len(model._forward_hooks), len(model.module._forward_hooks),
    len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks),
    len(observers), sum(len(each._post_accumulate_grad_hooks or ()) for each in model.parameters()),
    torch.save.__code__.co_filename.endswith("serialization.py"), len(ddpilot_hooks(torch_loader._BaseDataLoaderIter)),
)
"""

COUNT = """%%ddp
def ddpilot_hooks(owner):
    wrapping = getattr(owner.__next__, "_ddpilot_wrapping", None)
    return wrapping._hooks if wrapping is not None else ()
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A kernel with two ranks, which have a model, a loader and an optimizer."""
    with kernel_with_ranks() as kernel:
        for source in (MODEL, COUNT):
            made = kernel.run(source)
            assert made.failure == ""
        yield kernel


def shown(cell: Cell) -> dict[str, str]:
    """The only value that a cell shows, by MIME type."""
    assert cell.error == "", cell.error
    (data,) = [each["data"] for each in cell.outputs if "data" in each]
    return dict(data)


def hooks(kernel: Kernel) -> dict[int, list[str]]:
    """Numbers of hooks, by rank."""
    cell = kernel.run(HOOKS)
    assert cell.error == "", cell.error
    return cell.by_rank


def test_the_report_of_all_ranks_is_the_value_of_the_cell(kernel: Kernel) -> None:
    """Pictures as HTML, one screen as text; of a model that was wrapped in an earlier cell."""
    data = shown(kernel.run(RAW))
    assert "16 updates of 2 ranks, from the 5th on" in data["text/plain"]
    assert re.search(r"w waiting +[\d.]+ +[\d.]+", data["text/plain"])
    assert data["text/plain"].count("\n") < 40
    for part in ("One update", "How late each rank is", "Memory", "<svg"):
        assert part in data["text/html"]
    assert "<script" not in data["text/html"]


def test_the_value_can_be_plotted_saved_and_read(kernel: Kernel) -> None:
    """`_` is it, as after any cell."""
    kernel.run(RAW)
    cell = kernel.run("profile = _\nprofile.to_html('profile.html')\nprint(profile.summary.count('rank 1') > 2)")
    assert cell.failure == ""
    assert cell.stdout == "True\n"
    drawn = kernel.run("profile.plot()")
    assert "image/png" in shown(drawn)
    read = kernel.run("import os\nprint(os.path.getsize('profile.html'))\nos.unlink('profile.html')")
    assert 10_000 < int(read.stdout) < 200_000


@pytest.mark.parametrize("source", [LOOP, TRAINER], ids=["Loop", "Trainer"])
def test_loops_and_trainers_in_the_cell_are_profiled(kernel: Kernel, source: str) -> None:
    """With the samples that their loaders read; a named profile is a variable of the notebook."""
    data = shown(kernel.run(source))
    assert "16 updates of 2 ranks, from the 5th on" in data["text/plain"]
    assert "samples/s" in data["text/plain"]
    if source is LOOP:
        assert kernel.run("print(found.phases.seconds.shape)").stdout == "(2, 16, 12)\n"


def test_cells_in_turn_leave_no_hooks_behind(kernel: Kernel) -> None:
    """Neither those that succeed nor those that fail or make no updates."""
    before = hooks(kernel)
    assert len(before) == 2
    for source in (RAW, FAILING, "%%ddp --profile\nx = 1", RAW):
        kernel.run(source)
    assert hooks(kernel) == before


def test_a_cell_without_updates_says_so(kernel: Kernel) -> None:
    """And so does one with too few; nothing else is shown."""
    cell = kernel.run("%%ddp --profile\nx = 1")
    assert cell.failure == ""
    assert "ddpilot: no profile: too few updates: no rank made one. Profile at least 6 updates: steps of" in cell.stdout
    assert kernel.run("%%ddp --profile named\nx = 1\n").error == ""
    assert kernel.run("print(named)").stdout == "None\n"
    few = kernel.run(RAW.replace("optimizer.zero_grad()", "optimizer.zero_grad()\n    break"))
    assert "no profile: too few updates: 1 on rank 0, 1 on rank 1. Profile at least 6" in few.stdout
    assert not [each for each in (*cell.outputs, *few.outputs) if "data" in each]


def test_an_error_is_shown_as_without_a_profile(kernel: Kernel) -> None:
    """The same text, and no report."""
    profiled = kernel.run(FAILING)
    plain = kernel.run(FAILING.replace(" --profile", ""))
    assert "ValueError: planted" in profiled.stderr + profiled.error
    assert not [each for each in profiled.outputs if "data" in each]
    for text in ("----> 6", "ValueError: planted"):
        assert (text in profiled.stderr + profiled.error) == (text in plain.stderr + plain.error)
    assert kernel.run("%%ddp\nrank").by_rank == {0: ["0"], 1: ["1"]}


def test_some_ranks_and_wrong_options(kernel: Kernel) -> None:
    """A profile of one rank; a name that is not one; `--local` has no ranks to profile."""
    alone = """%%ddp --ranks 1 --profile
    single = torch.nn.Linear(8, 2)
    sgd = torch.optim.SGD(single.parameters(), lr=0.1)
    for x, y in loader:
        cross_entropy(single(x), y).backward()
        sgd.step()
    """.replace("\n    ", "\n")
    data = shown(kernel.run(alone))
    assert "16 updates of 1 rank, from the 5th on" in data["text/plain"]
    assert "rank 1 " in data["text/plain"]
    assert "'2x' is not the name of a variable" in kernel.run("%%ddp --profile 2x\nx = 1").error
    assert "`--local` runs the cell in the notebook" in kernel.run("%%ddp --local --profile\nx = 1").error
