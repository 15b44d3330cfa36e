# SPDX-License-Identifier: Apache-2.0
"""Lightning with the strategy "ddpilot" on emulated accelerators.

How far Lightning 2.6 takes a device that it does not know: `accelerator="auto"` looks for TPUs, MPS and CUDA only, and
takes the CPU. A Trainer takes an `Accelerator` of the user's. Its DDP then wraps the model in a stream of `torch.cuda`,
whatever the device is, unless `determine_ddp_device_ids` returns None: so the strategy here overrides that, and nothing
else. Fabric wraps in a stream of `torch.cuda` likewise and is not tried.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator import environment, why_not
from tests.conftest import TORCHMETRICS_ALONE
from tests.dist.launching.scripts import run_script

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one"),
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
    pytest.mark.timeout(200),
]

SHIMS = str(Path(__file__).parents[1] / "notebook" / "shims")

SET_UP = """
import ddpilot.integrations.lightning as ours  # first: it waits for Lightning's import
import json, warnings
warnings.simplefilter("ignore")
import torch
import lightning as library
from lightning.pytorch.accelerators import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from ddpilot.integrations.lightning.strategies import DdpilotStrategy

class Emu(Accelerator):
    def setup_device(self, device): torch.accelerator.set_device_index(device.index)
    def teardown(self): pass
    def get_device_stats(self, device): return {}
    @staticmethod
    def parse_devices(devices): return list(range(int(devices)))
    @staticmethod
    def get_parallel_devices(devices): return [torch.device("emu", index) for index in devices]
    @staticmethod
    def auto_device_count(): return torch.accelerator.device_count()
    @staticmethod
    def is_available(): return True
    @staticmethod
    def name(): return "emu"

class OnEmu(DdpilotStrategy):
    def determine_ddp_device_ids(self): return None

torch.manual_seed(0)
x = torch.randn(24, 4, dtype=torch.float64)
data = TensorDataset(x, x.prod(1, keepdim=True))
class Net(library.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        self.losses, self.places = [], []
    def forward(self, x): return self.layers(x)
    def training_step(self, batch, _):
        self.places.append((str(batch[0].device), str(self.layers[0].weight.device)))
        loss = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss
    def validation_step(self, batch, _): self.log("valid", (self(batch[0]) - batch[1]).abs().mean(), sync_dist=True)
    def predict_step(self, batch, _): return self(batch[0])
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.05)

def train(**how):
    library.seed_everything(1, verbose=False)
    net = Net()
    trainer = library.Trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                              enable_model_summary=False, **how)
    trainer.fit(net, DataLoader(data, batch_size=4))
    valid = trainer.validate(net, DataLoader(data, batch_size=4), verbose=False)
    predicted = torch.cat(trainer.predict(net, DataLoader(data, batch_size=5)))
    return dict(weights=[w.flatten().tolist() for w in net.state_dict().values()], losses=net.losses,
                places=sorted(set(net.places)), valid=valid[0]["valid"], predicted=predicted.flatten().tolist(),
                backend=trainer.strategy.process_group_backend)
"""


AUTO = """
trainer = library.Trainer(devices=2, strategy="ddpilot", logger=False, enable_checkpointing=False)
print("told " + json.dumps({"chosen": type(trainer.accelerator).__name__}), flush=True)
"""


def test_auto_takes_the_cpu_for_a_device_that_lightning_does_not_know(told: list[dict[str, Any]]) -> None:
    """If this fails, Lightning has learnt it: then the tests here need no `Accelerator` of their own."""
    assert told[0] == {"chosen": "CPUAccelerator"}


TRAIN = """
there = train(accelerator=Emu(), devices=2, strategy=OnEmu())
here = train(accelerator="cpu", devices=2, strategy="ddpilot")
print("told " + json.dumps({"there": there, "here": here}), flush=True)
"""


def test_strategy_trains_on_the_device_with_the_numbers_of_the_cpu(told: list[dict[str, Any]]) -> None:
    """Losses, weights, a metric reduced over ranks and predictions in order, to 1e-10; over the device's backend."""
    there, here = told[1]["there"], told[1]["here"]
    assert there["places"] == [["emu:0", "emu:0"]]
    assert there["losses"] == pytest.approx(here["losses"], rel=1e-10)
    assert there["valid"] == pytest.approx(here["valid"], rel=1e-6)  # Lightning keeps metrics in float32
    for name in ("weights", "predicted"):
        for seen, known in zip(there[name], here[name], strict=True):
            assert seen == pytest.approx(known, rel=1e-10), name


HANG = """
from ddpilot import Launcher, RankError, WatchError
class Odd(Net):
    def on_train_batch_end(self, *_):
        if self.global_rank == 1 and self.global_step == 2: raise ValueError("bad batch")
trainer = library.Trainer(accelerator=Emu(), devices=2, strategy=OnEmu(launcher=Launcher(timeout_s=100)), max_epochs=2,
                          logger=False, enable_checkpointing=False, enable_progress_bar=False)
try:
    trainer.fit(Odd(), DataLoader(data, batch_size=4))
except RankError as error:
    print("told " + json.dumps({"rank": error.rank, "said": str(error)}), flush=True)
"""


def test_an_error_of_one_rank_ends_the_rank_that_waits_for_its_device(told: list[dict[str, Any]]) -> None:
    """The other rank reads its loss behind an all_reduce of gradients that does not come."""
    assert told[2]["rank"] == 1
    assert "ValueError: bad batch" in told[2]["said"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the three programs told, one after the other in a process that has two devices: Lightning takes 3 s."""
    env = environment(2)
    env |= {"PYTHONPATH": os.pathsep.join((SHIMS, env["PYTHONPATH"])), **TORCHMETRICS_ALONE}
    out = run_script(SET_UP + AUTO + TRAIN + HANG, tmp_path_factory.mktemp("told"), env=env, limit_s=190).out
    lines = [line for line in out.splitlines() if line.startswith("told ")]
    assert len(lines) == 3, out
    return [json.loads(line.removeprefix("told ")) for line in lines]
