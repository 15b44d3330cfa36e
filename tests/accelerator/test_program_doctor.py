# SPDX-License-Identifier: Apache-2.0
"""`ddpilot doctor train.py` on emulated accelerators: tensors that are not on the device of their rank, by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.accelerator import why_not
from tests.accelerator.on_device import call
from tests.soak import IS_SOAK, soak

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one"),
    pytest.mark.timeout(170),
]

SCRIPT = """
import os
import torch, torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(10, 16), torch.nn.Linear(16, 3)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        return self.head(torch.relu(self.body(x)) * self.scale)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(local_rank)
    device = torch.device("emu", local_rank)
    dist.init_process_group("cpu:gloo,emu:eccl")
    torch.manual_seed(0)
    model = DistributedDataParallel(Net().to(device), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(96, 10, generator=generator), torch.randint(3, (96,), generator=generator))
    weight = torch.ones(3).to(device)
    for x, y in DataLoader(data, batch_size=8, sampler=DistributedSampler(data)):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, weight=weight)
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


CHANGES: dict[str, list[tuple[str, str]]] = {
    "right": [],
    "class weights": [("torch.ones(3).to(device)", 'torch.ones(3).to("emu:0")')],
    "targets": [("x.to(device), y.to(device)", "x.to(device), y")],
    "attribute": [('self.register_buffer("scale", torch.ones(16))', "self.scale = torch.ones(16)")],
}
LEFT_ON_CPU = [
    ("Net().to(device), device_ids=[local_rank]", "Net()"),
    ("x, y = x.to(device), y.to(device)", "pass"),
    ("torch.ones(3).to(device)", "torch.ones(3)"),
]


def changed(*changes: tuple[str, str]) -> str:
    """The script with these texts replaced."""
    text = SCRIPT
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the doctor finds about each of the scripts, on two devices."""
    kinds = CHANGES | ({"left on the CPU": LEFT_ON_CPU} if IS_SOAK else {})
    scripts = {name: changed(*changes) for name, changes in kinds.items()}
    folder = str(tmp_path_factory.mktemp("scripts"))
    printed = call("tests.accelerator.doctoring:check_all", folder, scripts, limit_s=160)
    return {name: json.loads(text) for name, text in printed.items()}


def wrong_rung(found: dict[str, Any]) -> dict[str, Any]:
    """The rung at which the ladder has stopped."""
    (rung,) = [each for each in found["rungs"] if each["status"] == "wrong"]
    return dict(rung)


def test_a_right_script_has_all_tensors_on_its_devices(found: dict[str, dict[str, Any]]) -> None:
    """Parameters, buffer, input, target and class weights are counted."""
    by_letter = {each["rung"]: each for each in found["right"]["rungs"]}
    assert by_letter["d"]["status"] == "ok", by_letter
    assert by_letter["d"]["evidence"] == ("4 parameters, 1 buffer, 1 input, 1 target, 1 loss weight: on emu:0, emu:1")
    assert by_letter["e"]["status"] == "ok", by_letter


def test_class_weights_on_the_first_device_are_named_at_d(found: dict[str, dict[str, Any]]) -> None:
    """One process does not show it: its device is the first one."""
    rung = wrong_rung(found["class weights"])
    assert rung["rung"] == "d", rung
    (finding,) = rung["findings"]
    assert finding["code"] == "DDP118"
    assert finding["ranks"] == [1]
    assert finding["evidence"][0] == "loss weight `weight` of cross_entropy is on emu:0 in rank 1, where emu:1 computes"
    assert finding["place"]["text"] == "loss = F.cross_entropy(model(x), y, weight=weight)"


def test_targets_that_were_not_moved_are_named(found: dict[str, dict[str, Any]]) -> None:
    """One process fails with them already."""
    rung = wrong_rung(found["targets"])
    assert rung["rung"] == "a", rung
    (finding,) = rung["findings"]
    assert finding["code"] == "DDP412"
    assert finding["evidence"][0] == "target `y` of cross_entropy is on cpu in rank 0, where emu:0 computes"


def test_a_plain_attribute_that_did_not_move_with_the_model_is_named(found: dict[str, dict[str, Any]]) -> None:
    """In full, as the program reaches it."""
    rung = wrong_rung(found["attribute"])
    (finding,) = rung["findings"]
    assert finding["evidence"][0] == "attribute `model.scale` is on cpu in rank 0, where emu:0 computes"


@soak
def test_a_model_that_was_left_on_the_cpu_is_named_layer_by_layer(found: dict[str, dict[str, Any]]) -> None:
    """It runs, on the wrong device."""
    rung = wrong_rung(found["left on the CPU"])
    assert rung["rung"] == "d", rung
    names = [line.partition("`")[2].partition("`")[0] for line in rung["findings"][0]["evidence"]]
    assert names[:5] == ["model.scale", "model.body.weight", "model.body.bias", "model.head.weight", "model.head.bias"]
