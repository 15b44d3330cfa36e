# SPDX-License-Identifier: Apache-2.0
"""The strategy "ddpilot" with the real Lightning: its numbers, existing ranks, results and errors."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import COLLECT, TORCHMETRICS_ALONE
from tests.dist.launching.scripts import Outcome, finish, run_script, running, wait_until
from tests.soak import often

ENV = {
    **TORCHMETRICS_ALONE,
    "OMP_NUM_THREADS": "1",
}  # which Lightning sets later, and then ranks need another rank server
pytestmark = pytest.mark.timeout(300)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

SET_UP = """
import ddpilot.integrations.lightning as ours  # first: it waits for Lightning's import
import importlib, json, os, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader, TensorDataset
import LIBRARY as library
from ddpilot import Launcher, LaunchError, RankError, ShipError

torch.manual_seed(0)
x = torch.randn(24, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
quiet = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
             enable_model_summary=False)
class Net(library.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.losses = torch.nn.Linear(4, 1), []
    def forward(self, x): return self.layer(x)
    def training_step(self, batch, _):
        loss = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss
    def validation_step(self, batch, _): self.log("valid", (self(batch[0]) - batch[1]).abs().mean(), sync_dist=True)
    def predict_step(self, batch, _): return {"rows": self(batch[0]), "names": [str(float(row[0])) for row in batch[0]]}
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.05)
def loader(size=4): return DataLoader(data, batch_size=size)
def tell(**facts): print("told " + json.dumps(facts), flush=True)
def numbers(tensor): return [round(number, 6) for number in tensor.flatten().tolist()]
"""

TRAIN = """
library.seed_everything(1, verbose=False)
net = Net()
(x @ x.T).requires_grad_().sum().backward()
forks = []
os.register_at_fork(before=lambda: forks.append(1))
def refuse(): raise RuntimeError("CUDA was asked for in the parent")
torch.cuda._lazy_init = refuse
trainer = library.Trainer(devices=2, strategy="ddpilot", max_epochs=2, **quiet)
trainer.fit(net, loader(), loader())
valid = trainer.validate(net, loader(), verbose=False)
known, steps = float(trainer.callback_metrics["valid"]), trainer.global_step
if trainer.is_global_zero:
    starts = trainer.strategy.launcher is not None
    rows = trainer.predict(net, loader(5))
    tell(weights=numbers(net.layer.weight), losses=net.losses, valid=round(valid[0]["valid"], 6), starts=starts,
         known=round(known, 6), steps=steps, forks=len(forks), kind=type(trainer.strategy).__name__,
         batches=[len(batch["rows"]) for batch in rows],
         in_order=starts and bool(torch.allclose(torch.cat([batch["rows"] for batch in rows]), net(x))),
         names=starts and [n for batch in rows for n in batch["names"]] == [str(float(row[0])) for row in x])
else:
    trainer.predict(net, loader(5))
"""

MORE_DEVICES = """
try: library.Trainer(devices=3, strategy="ddpilot", **quiet)
except ValueError as error: print(error, file=sys.stderr, flush=True)
"""

TELL_PAUSES = """
import time
def tell_pause(seconds, sleep=time.sleep):
    print("paused", file=sys.stderr, flush=True)
    sleep(seconds)
time.sleep = tell_pause
print("the end", file=sys.stderr, flush=True)
"""


def program(*sources: str, library: str = "lightning") -> str:
    """`sources` one after the other, each of which prints an object."""
    return "".join((SET_UP, *sources)).replace("LIBRARY", library)


def told(outcome: Outcome) -> list[dict[str, Any]]:
    """The objects that were printed."""
    lines = [line for line in outcome.out.splitlines() if line.startswith("told ")]
    return [json.loads(line.removeprefix("told ")) | {"stderr": outcome.err} for line in lines]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the programs below told, which share a process: Lightning is imported there, and in its rank server. The
    last is interrupted when its ranks train.
    """
    programs = {"train": TRAIN, "errors": ERRORS, "again": AGAIN, "mapped": MAPPED, "stopped": STOPPED}
    folder = tmp_path_factory.mktemp("here")
    with running(program(*programs.values()), folder, env=ENV) as process:
        wait_until(lambda: all((folder / f"{rank}.there").exists() for rank in range(2)), limit_s=200)
        process.send_signal(signal.SIGINT)
        outcome = finish(process)
    assert outcome.code == 0, outcome
    return dict(zip(programs, told(outcome), strict=True))


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same script, where torchrun has started the ranks, and how they end: they collect garbage at exit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(COLLECT)
        source, folder = program(TRAIN, MORE_DEVICES, TELL_PAUSES), tmp_path_factory.mktemp("torchrun")
        (facts,) = told(run_script(source, folder, env=ENV, limit_s=240, module=TORCHRUN))
    return facts


def test_strategy_starts_nothing_under_torchrun(under_torchrun: dict[str, Any]) -> None:
    """There it is plain DDP of the ranks that torchrun started."""
    assert not under_torchrun["starts"]
    assert under_torchrun["steps"] == 6


def test_strategy_refuses_other_numbers_of_devices_under_torchrun(under_torchrun: dict[str, Any]) -> None:
    """As "ddp" does: with 3 devices on 2 ranks, a third of the samples would belong to no rank."""
    assert under_torchrun["stderr"].count("(3 * 1) does not match the world size (2)") == 2


def test_strategy_lets_gloos_threads_end_under_torchrun(under_torchrun: dict[str, Any]) -> None:
    """Lightning does not destroy its gloo group, and torch aborts a process if a thread still frees its tensors."""
    assert "paused" in under_torchrun["stderr"].partition("the end")[2]


@often("lightning")
@pytest.mark.parametrize("library", ["lightning", "pytorch_lightning"])
def test_strategy_trains_as_torchrun_does(
    under_torchrun: dict[str, Any], here: dict[str, dict[str, Any]], library: str, tmp_path: Path
) -> None:
    """The same losses and weights, without a fork of the parent, which did not use CUDA; predictions in order."""
    ours = here["train"]
    if library != "lightning":
        (ours,) = told(run_script(program(TRAIN, library=library), tmp_path, env=ENV, limit_s=240))
    same = ("weights", "valid", "known", "steps")
    assert [ours[name] for name in same] == [under_torchrun[name] for name in same]
    assert ours["losses"] == pytest.approx(under_torchrun["losses"], rel=1e-5)
    assert ours["starts"]
    assert ours["kind"].endswith("DdpilotStrategy")
    assert ours["forks"] == 0
    assert ours["batches"] == [5, 5, 5, 5, 4]
    assert ours["in_order"]
    assert ours["names"]


AGAIN = """
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
class Count(library.Callback):
    def __init__(self): self.epochs, self.hidden = [], object()
    def on_train_epoch_end(self, trainer, module): self.epochs.append(trainer.current_epoch)
class Keep(library.Callback):  # saves in checkpoints what no plain attribute holds
    def __init__(self): self.queue = Queue()
    def on_train_epoch_end(self, trainer, module): self.queue.items.append(trainer.current_epoch)
    def state_dict(self): return {"items": self.queue.items}
    def load_state_dict(self, state): self.queue.items = state["items"]
class Queue:
    def __init__(self): self.items = []
def fit_twice(strategy, folder):
    library.seed_everything(1, verbose=False)
    net, count, keep = Net(), Count(), Keep()
    saving = ModelCheckpoint(monitor="valid", save_last=True)
    callbacks = [count, keep, saving, EarlyStopping("valid", patience=9), Timer(), EMAWeightAveraging(decay=0.5)]
    kept = {"logger": CSVLogger(folder), "enable_checkpointing": True, "log_every_n_steps": 1}
    trainer = library.Trainer(devices=1, max_epochs=2, callbacks=callbacks, strategy=strategy, **{**quiet, **kept})
    trainer.fit(net, loader(), loader())
    first = trainer.current_epoch, trainer.global_step, dict(trainer.logged_metrics)
    trainer.fit(net, loader(), loader())  # nothing left to do
    trainer.fit_loop.max_epochs = 3
    trainer.fit(net, loader(), loader())
    rows = open(f"{trainer.logger.log_dir}/metrics.csv").read().splitlines()
    stop = trainer.early_stopping_callback
    return [*first[:2], numbers(first[2]["valid"]), trainer.current_epoch, trainer.global_step,
        numbers(net.layer.weight), net.losses, count.epochs, keep.queue.items, len(rows),
        sorted(os.listdir(folder + "/lightning_logs")),
        numbers(saving.best_model_score), os.path.basename(saving.best_model_path), numbers(stop.best_score),
        stop.wait_count, stop.stopping_reason.name, trainer.state.status.value, trainer.logger.version,
        os.path.exists(saving.last_model_path)]
with_ours = fit_twice("ddpilot", "ours")
plain = fit_twice("ddp", "plain")  # with one device it starts no process; its samples come in the same order
starts = [library.Trainer(devices=n, strategy="ddpilot", **quiet).strategy.launcher is not None for n in (1, 2)]
tell(plain=plain, ours=with_ours, starts=starts)
"""


def test_a_trainer_fits_again_as_on_one_device(here: dict[str, dict[str, Any]]) -> None:
    """Progress, metrics, callbacks, checkpoints and the log's file are those of fits in this process."""
    assert here["again"]["ours"] == here["again"]["plain"]


def test_the_ranks_are_started_after_a_fit_with_ddp_on_one_device(here: dict[str, dict[str, Any]]) -> None:
    """Which leaves LOCAL_RANK set, as a launcher does for its ranks: two devices would train on half of the data."""
    assert here["again"]["starts"] == [False, True]
    assert here["mapped"]["on_ranks"]


MAPPED = """
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.fabric import Fabric
import lightning.fabric.connector as fabric_connector
from lightning.pytorch.trainer.connectors import accelerator_connector
class OfALibrary(DDPStrategy):  # as RF-DETR has one
    def _configure_launcher(self): self._launcher = _MultiProcessingLauncher(self, start_method="spawn")
def make(strategy): return library.Trainer(devices=2, strategy=strategy, max_epochs=1, **quiet)
before = dict(StrategyRegistry), _MultiProcessingLauncher.launch, _MultiProcessingLauncher.is_interactive_compatible
accelerator_connector._IS_INTERACTIVE = fabric_connector._IS_INTERACTIVE = True  # what Lightning knows notebooks by
try: make(OfALibrary())
except Exception as error: refused = type(error).__name__
ours.use_for_notebooks()
ours.use_for_notebooks()
names = ["auto", "ddp_notebook", "ddp_spawn", "ddp_fork", "ddp_notebook_find_unused_parameters_true"]
made = [make(name).strategy for name in names]
kinds = [type(strategy).__name__ for strategy in made]
class TestAtTheEnd(library.Callback):
    def on_fit_end(self, trainer, module):
        module.process = os.getpid()
        trainer.test(module, loader(), verbose=False)
Net.test_step = Net.validation_step
net, trainer = Net(), make(OfALibrary(find_unused_parameters=True))
trainer.callbacks.append(TestAtTheEnd())
first = net.layer.weight.clone()
trainer.fit(net, loader())
trained = not torch.equal(first, net.layer.weight) and "valid" in trainer.callback_metrics
fabric = type(Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn").strategy).__name__
ours.use_for_notebooks(False)
now = dict(StrategyRegistry), _MultiProcessingLauncher.launch, _MultiProcessingLauncher.is_interactive_compatible
tell(refused=refused, kinds=kinds, options=made[-1]._ddp_kwargs, object=[trainer.global_step, len(net.losses)],
     fabric=fabric, back=now == before, trained=trained, on_ranks=net.process != os.getpid())
"""


def test_use_for_notebooks_maps_names_and_objects_and_takes_it_back(here: dict[str, dict[str, Any]]) -> None:
    """Names become ours with their options; an object that a library made keeps its class, and its ranks start."""
    facts = here["mapped"]
    assert facts["refused"] == "MisconfigurationException"
    assert facts["kinds"] == ["DdpilotStrategy"] * 5
    assert facts["options"] == {"find_unused_parameters": True}
    assert facts["object"] == [3, 3]
    assert facts["trained"]  # although the fit ended in a test on the ranks, as RF-DETR's does
    assert facts["fabric"] == "DdpilotFabricStrategy"
    assert facts["back"]
    assert facts["stderr"].count("start their ranks from ddpilot's rank server") == 1


ERRORS = """
import threading
found = {}
def attempt(name, kind, act):
    try: act()
    except kind as error: found[name] = str(error)
def trainer(**more): return library.Trainer(**{"devices": 2, "strategy": "ddpilot", "max_epochs": 1, **quiet, **more})
net = Net()
net.lock = threading.Lock()
attempt("ship", ShipError, lambda: trainer().fit(net, loader()))
del net.lock
net.spare = torch.nn.Linear(1, 1)
attempt("unused", RankError, lambda: trainer().fit(net, loader()))
attempt("nodes", LaunchError, lambda: trainer(num_nodes=2).fit(net, loader()))
attempt("method", TypeError, lambda: ours.DdpilotStrategy(start_method="fork"))
from lightning.fabric import Fabric
attempt("fabric", TypeError, Fabric(accelerator="cpu", devices=2, strategy="ddpilot").launch)
def note(self): self.deterministic = torch.is_deterministic_algorithms_warn_only_enabled()
Net.on_train_start = note
torch.use_deterministic_algorithms(True, warn_only=True)
silent = ours.DdpilotStrategy(find_unused_parameters=True, launcher=Launcher(output="silent"))
trainer(strategy=silent).fit(net, loader())
found["trained"] = [len(net.losses), net.deterministic]
torch.use_deterministic_algorithms(False)
tell(**found)
"""


def test_errors_state_the_fix(here: dict[str, dict[str, Any]]) -> None:
    """What cannot travel by its path in the user's objects, unused parameters with our names, several nodes."""
    facts = here["errors"]
    assert "starting 2 ranks of `Trainer.fit`: `model.lock` (_thread.lock) cannot be pickled" in facts["ship"]
    assert "strategy='ddpilot_find_unused_parameters_true'" in facts["unused"]
    assert "running `Trainer.fit` on 2 ranks" in facts["unused"]
    assert "`num_nodes=2`" in facts["nodes"]
    assert "Start the script on each node with `ddpilot run`" in facts["nodes"]
    assert "takes no `start_method`" in facts["method"]
    assert "pass `Fabric.launch` the function" in facts["fabric"]
    assert facts["trained"] == [3, True]


STOPPED = """
import time
class Slow(Net):
    def on_train_batch_start(self, batch, index):
        open(f"{self.global_rank}.there", "w").close()
        if self.slow: time.sleep(600)
net = Slow()
net.slow = True
try: library.Trainer(devices=2, strategy="ddpilot", max_epochs=1, **quiet).fit(net, loader())
except ours.RanksStopped as error: stopped = str(error)
net.slow = False
library.Trainer(devices=2, strategy="ddpilot", max_epochs=1, **quiet).fit(net, loader())
import signal
tell(stopped=stopped, trained=len(net.losses), handled=signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_ctrl_c_ends_the_ranks_and_leaves_the_process_usable(here: dict[str, dict[str, Any]]) -> None:
    """Lightning would leave the process with exit code 1, and ignore every later Ctrl-C."""
    facts = here["stopped"]
    assert facts["stopped"].startswith("the launch of `Trainer.fit` was stopped: rank 0 ")
    assert facts["trained"] == 3
    assert facts["handled"]
