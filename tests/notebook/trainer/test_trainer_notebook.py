# SPDX-License-Identifier: Apache-2.0
"""A trainer in a real notebook: fit on two ranks, predict, export, fit again; the stop button."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.notebook.kernels import Kernel

SETUP = """
import torch, ddpilot
from torch.utils.data import TensorDataset
a = torch.randn(300, 300, requires_grad=True)
(a @ a).sum().backward()          # torch was used here

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)

x = torch.linspace(-1, 1, 400).reshape(4, 100).t()
data = TensorDataset(x, x.prod(1, keepdim=True))
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
first = model.layers[0].weight

class Losses(ddpilot.Callback):
    def __init__(self):
        self.seen = []

    def on_epoch_end(self, run):
        self.seen.append(run.metrics["loss"])

losses = Losses()
trainer = ddpilot.Trainer(
    model, torch.nn.functional.mse_loss, optimizer, callbacks=[losses], metrics={"error": lambda o, y: (o - y).abs()}
)
"""

EXPORT = """
inputs = (x[:5],)
program = torch.export.export(model.eval(), inputs)
assert torch.allclose(program.module()(*inputs), predicted[:5], atol=1e-6)
other = Net()
other.load_state_dict(model.state_dict())
assert torch.allclose(other(x[:5]), predicted[:5])
print("exported", type(model).__name__)
"""

SLOW = """
import time

class Slow(ddpilot.Callback):
    ranks = "all"

    def on_update_end(self, run):
        if run.loop.rank == 0 and run.update == 20:
            print("update 20 is done", flush=True)
        time.sleep(0.05)

slow = lambda parameters: torch.optim.SGD(parameters, lr=0.01)
endless = ddpilot.Trainer(Net(), torch.nn.functional.mse_loss, slow, callbacks=[Slow()])
weight = endless.model.layers[0].weight.detach().clone()
endless.fit(data, epochs=10_000, global_batch_size=2, nproc_per_node=2)
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """One for all tests here: what a notebook has been through must not matter."""
    kernel = Kernel()
    try:
        done = kernel.run(f"{SETUP}\ntrainer.predict(data, nproc_per_node=1)")  # starts the rank server
        assert done.error == "", done.error
        yield kernel
    finally:
        kernel.close()


def ok(kernel: Kernel, source: str) -> str:
    """What a cell prints that goes well."""
    cell = kernel.run(source)
    assert cell.error == "", cell.error
    return cell.stdout + "".join(cell.shown)


@pytest.mark.timeout(120)
def test_fit_predict_export_and_fit_again_in_one_notebook(kernel: Kernel) -> None:
    """The notebook's own model, optimizer and callback have what the ranks made; no CUDA context was made."""
    fit = "trainer.fit(data, data, epochs=2, global_batch_size=20, nproc_per_node=2)"
    shown = ok(kernel, fit)
    assert "[rank 0] epoch 1 (2 of 2): loss 0." in shown
    assert "History(2 epochs, 10 updates; last: loss=" in shown
    check = "print(model.layers[0].weight is first, first.device, len(losses.seen), torch.cuda.is_initialized())"
    assert ok(kernel, check) == "True cpu 2 False\n"
    ok(kernel, "predicted = trainer.predict(data)")
    assert ok(kernel, "print(tuple(predicted.shape), torch.allclose(predicted, model(x)))") == "(100, 1) True\n"
    assert ok(kernel, EXPORT) == "exported Net\n"
    ok(kernel, fit)
    again = "print([row['loss'] for row in trainer.history.epochs] == losses.seen, first is model.layers[0].weight)"
    assert ok(kernel, again) == "True True\n"
    steps = "print({int(state['step']) for state in optimizer.state.values()}, losses.seen[-1] < losses.seen[0])"
    assert ok(kernel, steps) == "{20} True\n"
    is_watched = "from ddpilot.training.progress import is_watched; print(is_watched())"
    assert ok(kernel, is_watched) == "True\n"  # so that a fit in this process has a bar
    plotted = kernel.run("trainer.plot()")
    assert [("image/png" in output["data"]) for output in plotted.outputs if "data" in output] == [True]


@pytest.mark.timeout(120)
def test_the_stop_button_keeps_the_model_so_far(kernel: Kernel) -> None:
    """fit returns after the update; weights and history are here, and the notebook goes on. There was a bar."""
    stopped = kernel.run(SLOW, interrupt_on="update 20 is done")
    assert stopped.error == "", stopped.error
    assert "stopped after update" in stopped.stdout
    assert "(interrupted)" in stopped.stdout
    assert re.search(r"epoch 0 \(1/10000\): .*\| \d+/50 \[.*batches/s, loss 0\.\d", stopped.stderr)
    check = "print(endless.position.num_updates >= 20, len(endless.history.updates) == endless.position.num_updates)"
    assert ok(kernel, check) == "True True\n"
    assert ok(kernel, "print(torch.equal(weight, endless.model.layers[0].weight))") == "False\n"
    assert ok(kernel, "endless.callbacks.clear(); print(tuple(endless.predict(data).shape))") == "(100, 1)\n"


@pytest.mark.timeout(120)
def test_an_error_on_a_rank_shows_the_line_of_the_cell(kernel: Kernel) -> None:
    """As `launch` does, without the trainer's own frames; the model is as it was."""
    ok(kernel, "def bad_loss(output, y):\n    raise ValueError('no loss today')")
    cell = kernel.run("ddpilot.Trainer(model, bad_loss, optimizer).fit(data, global_batch_size=20, nproc_per_node=2)")
    assert cell.error_name == "RankError"
    assert "raise ValueError('no loss today')" in cell.error
    assert "trainer/fit" not in cell.error
    unpicklable = kernel.run(
        "import threading; model.lock = threading.Lock()\ntrainer.fit(data, global_batch_size=20, nproc_per_node=2)"
    )
    assert unpicklable.error_name == "ShipError"
    assert "model.lock" in unpicklable.error
