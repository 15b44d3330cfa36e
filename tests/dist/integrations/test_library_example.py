# SPDX-License-Identifier: Apache-2.0
"""The toy library of examples/library: its notebook, its numbers under torchrun, and no CUDA before its first use."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import ddpilot
from tests.dist.launching.scripts import run_script
from tests.notebook.executed import execute, stream
from tests.notebook.stored import find_differences
from tests.preload import PRELOAD

LIBRARY = Path(__file__).parents[3] / "examples" / "library"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

SCRIPT = """
import json, torch

class Asked(Exception): pass
def refuse(*_): raise Asked
if POISON:  # whatever starts CUDA, or asks it for devices
    for owner, name in ((torch.cuda, "_lazy_init"), (torch.cuda, "is_available"), (torch.cuda, "device_count"),
                        (torch.cuda, "init"), (torch.accelerator, "is_available"), (torch.accelerator, "device_count")):
        setattr(owner, name, refuse)

import ddpilot
from tinydigits import Classifier, Settings
torch.manual_seed(0)
rows = torch.randn(256, 8)
labels = (rows[:, 0] > 0).long()
model = Classifier(num_features=8, num_classes=2)
ddpilot.ensure_on_device(model.net, "cpu")
history = model.train(rows, labels, devices=2, settings=Settings(epochs=3))
try:
    asked = bool((model.predict(rows) == labels).double().mean() < 0.8)
except Asked:
    asked = True
if ddpilot.topology().is_rank_zero:
    print(json.dumps({"losses": history.losses, "size": history.world_size, "asked": asked}))
"""


def test_library_starts_no_cuda_before_its_first_use_and_trains_as_under_torchrun(tmp_path: Path) -> None:
    """Import, a model and a training on two ranks do not use CUDA in this process; predicting does."""
    env = {"PYTHONPATH": os.pathsep.join(filter(None, (str(LIBRARY), os.environ.get("PYTHONPATH"))))}
    launched = run_script(SCRIPT.replace("POISON", "True"), tmp_path, env=env)
    under_torchrun = run_script(SCRIPT.replace("POISON", "False"), tmp_path, env=env, module=TORCHRUN)
    here, there = (json.loads(outcome.out.splitlines()[-1]) for outcome in (launched, under_torchrun))
    assert here["losses"] == pytest.approx(there["losses"], rel=1e-5)
    assert here["losses"][-1] < here["losses"][0]
    assert (here["size"], there["size"]) == (2, 2)
    assert here["asked"]
    assert not there["asked"]


def test_library_refuses_devices_that_it_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists and other values, and another number than torchrun has started."""
    monkeypatch.syspath_prepend(LIBRARY)
    tinydigits = importlib.import_module("tinydigits")
    classifier, num_ranks = tinydigits.Classifier(8, 2), tinydigits.num_ranks
    assert [num_ranks(given) for given in ("auto", -1, 2, "2")] == ["auto", "auto", 2, 2]
    rows, labels = torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)
    for given in ([0, 2], "two", 0, True, None):
        with pytest.raises(ValueError, match="give a number of devices, or 'auto'"):
            classifier.train(rows, labels, devices=given)
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    for name, value in {**torchrun, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert [num_ranks(given) for given in ("auto", 2)] == ["auto", 2]
    with pytest.raises(ValueError, match="devices=3, and .* has started 2 ranks on this machine"):
        classifier.train(rows, labels, devices=3)


def move_wrapped() -> str:
    """The error of `ensure_on_device` for a DDP module on a different device."""
    from torch.nn.parallel import DistributedDataParallel

    with ddpilot.init_group():
        module = DistributedDataParallel(torch.nn.Linear(1, 1))
        assert ddpilot.ensure_on_device(module, "cpu") is module
        with pytest.raises(ddpilot.DdpilotError) as caught:
            ddpilot.ensure_on_device(module, "cuda:0")
        return str(caught.value)


def test_ensure_on_device_refuses_to_move_a_ddp_module() -> None:
    """Its buckets would not be moved; on its own device it is accepted."""
    said = ddpilot.Launcher(nproc_per_node=1, backend="gloo", preload=PRELOAD).run(move_wrapped)[0]
    assert said == (
        "moving DistributedDataParallel to cuda:0: it is a DistributedDataParallel module on cpu, where its gradient "
        "buckets would stay. Move the plain module, then wrap it"
    )


@pytest.mark.timeout(200)
def test_library_notebook_trains_predicts_exports_and_trains_again(tmp_path: Path) -> None:
    """After torch was used in it, on two devices and on one; a rank's error is named."""
    shutil.copytree(LIBRARY / "tinydigits", tmp_path / "tinydigits")
    cells = execute(LIBRARY / "train.ipynb", tmp_path, limit_s=180)
    printed = {name: stream(cell) for name, cell in cells.items()}
    assert "accuracy before training: 0." in printed["used"]
    assert printed["train"].startswith("2 devices, loss ")
    assert float(printed["predict"].split()[-1]) > 0.8
    assert "predicts the same: True" in printed["export"]
    assert printed["again"].startswith("1 device, loss goes on from 0.")
    assert "is out of bounds." in printed["wrong"]
    assert find_differences(LIBRARY / "train.ipynb", cells) == {}, "run `make notebooks` and commit examples"
