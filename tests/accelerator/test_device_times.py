# SPDX-License-Identifier: Apache-2.0
"""A profile on an asynchronous device: the device's times, read without waiting for them, and the line that waits."""

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
    pytest.mark.timeout(200),
]
SCRIPT = """
import json, os, sys, time
import torch
import torch.distributed as dist
device = torch.device("emu", int(os.environ["LOCAL_RANK"]))
torch.accelerator.set_device_index(device.index)
dist.init_process_group("cpu:gloo,emu:eccl")
net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).to(device)
model = torch.nn.parallel.DistributedDataParallel(net, device_ids=[device.index], bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, reads_s = torch.randn(512, 512), []
begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
for update in range(12):
    if update == 4:
        before = dict(torch.emu.host_syncs())
    loss = model(x.to(device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if update in (3, 11):  # updates end with their step: from here to here are those that are measured
        (begin if update == 3 else end).record()
    start_s = time.monotonic()
    total = loss.item()
    reads_s.append(time.monotonic() - start_s)
syncs = {name: num - before.get(name, 0) for name, num in torch.emu.host_syncs().items()}
torch.accelerator.synchronize()
found = {"reads_s": sum(reads_s[3:11]), "took_s": begin.elapsed_time(end) / 1e3, "syncs": syncs}
with open(sys.argv[1] + os.environ["RANK"], "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


def test_phases_are_those_of_the_device_and_nothing_waits_for_it(tmp_path: Path) -> None:
    """The host waits in `item()` for what the device computes in other phases; updates add up to the clock by 2 %.

    The line of the `item()` is named, and the copy to the device is a share of its own.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ddpilot", "profile", str(script), "-n", "2", "--json"]
    done = subprocess.run(
        [*command, "--", str(tmp_path / "rank")],
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    profile = json.loads(done.stdout)
    assert profile["clock"] == "emu"
    assert "times of the emu device" in profile["summary"]
    work = ("forward", "backward", "communication", "waiting", "optimizer")
    sync, *works = (profile["shares"].index(name) for name in ("sync", *work))
    for rank in (0, 1):
        of_host = json.loads((tmp_path / f"rank{rank}").read_text())
        assert {name: num for name, num in of_host["syncs"].items() if num} == {"item": 8, "copy to device": 8}
        updates = profile["seconds"][rank]
        assert len(updates) == 8
        assert sum(map(sum, updates)) == pytest.approx(of_host["took_s"], rel=0.02)
        assert sum(update[sync] for update in updates) < 0.5 * of_host["reads_s"]
        assert sum(update[each] for update in updates for each in (sync, *works)) > of_host["reads_s"]
        assert all(update[profile["shares"].index("copy")] > 0 for update in updates)
    assert all(each > 0 for each in profile["overlapped"])
    reads = [each for each in profile["findings"] if each["code"] == "DDP741"]
    assert [each["place"]["text"] for each in reads] == ["total = loss.item()"]
