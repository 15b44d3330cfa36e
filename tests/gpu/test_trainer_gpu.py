# SPDX-License-Identifier: Apache-2.0
"""A trainer where there is a GPU: it is touched by the ranks, and here not before the first prediction."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpilot.environments.nvml import count_accelerators
from tests.dist.launching.scripts import run_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_accelerators(os.environ) == 0, reason="no NVIDIA device is visible to NVML here"),
]

# In a process of its own: another test may have used the GPU in this one.
SCRIPT = """
import torch, ddpilot
from torch.utils.data import TensorDataset

class Where(ddpilot.Callback):
    def __init__(self):
        self.seen = []
    def on_fit_start(self, run):
        self.seen.append(next(run.model.parameters()).device.type)

x = torch.linspace(-1, 1, 400).reshape(100, 4)
data = TensorDataset(x, x.prod(1, keepdim=True))
model = torch.nn.Linear(4, 1)
weight, where = model.weight, Where()
trainer = ddpilot.Trainer(
    model, torch.nn.functional.mse_loss, lambda p: torch.optim.AdamW(p, lr=0.01), callbacks=[where], precision="bf16"
)
trainer.fit(data, data, epochs=1, global_batch_size=20, progress=False)
print(where.seen, weight.device, torch.cuda.is_initialized())
first = trainer.predict(data)
print(first.device, weight.device.type, model.weight is weight)
trainer.fit(data, data, epochs=1, global_batch_size=20, nproc_per_node=2, progress=False)
print(where.seen, weight.device.type, torch.equal(first, trainer.predict(data)))
steps = {int(state["step"]) for state in trainer.optimizers["optimizer"].state.values()}
program = torch.export.export(model, (x[:2].cuda(),))
print(steps, tuple(program.module()(x[:2].cuda()).shape))
"""


@pytest.mark.timeout(180)
def test_trainer_touches_the_gpu_on_ranks_and_here_with_the_first_prediction(tmp_path: Path) -> None:
    """fit, predict, export and fit again, with two ranks that may share the device."""
    lines = run_script(SCRIPT, tmp_path, limit_s=150).out.splitlines()
    assert lines[-4:] == [
        "['cuda'] cpu False",
        "cpu cuda True",
        "['cuda', 'cuda'] cuda False",
        "{10} (2, 1)",
    ]
