# SPDX-License-Identifier: Apache-2.0
"""A profile on the emulated accelerator names the line that waits for the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator import environment, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one"),
    pytest.mark.timeout(150),
]
SCRIPT = """
import os
import torch
import torch.distributed as dist
device = torch.device("emu", int(os.environ["LOCAL_RANK"]))
torch.accelerator.set_device_index(device.index)
dist.init_process_group("cpu:gloo,emu:eccl")
net = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(20))).to(device)
model = torch.nn.parallel.DistributedDataParallel(net, device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, total = torch.randn(256, 128), 0.0
for _ in range(16):
    loss = model(x.to(device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item()
dist.destroy_process_group()
"""


def test_the_line_that_reads_the_loss_in_each_update_is_named(tmp_path: Path) -> None:
    """The wait is a share of its own, and so is the copy to the device."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ddpilot", "profile", str(script), "-n", "2", "--json"]
    done = subprocess.run(
        command, env={**os.environ, **environment()}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    reads = [each for each in found["findings"] if each["code"] == "DDP741"]
    assert [each["place"]["text"] for each in reads] == ["total += loss.item()"]
    for name in ("sync", "copy"):
        assert all(update[found["shares"].index(name)] > 0 for update in found["seconds"][0])
