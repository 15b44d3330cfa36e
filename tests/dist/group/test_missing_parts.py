# SPDX-License-Identifier: Apache-2.0
"""Errors of `init_group` if a part of torch is missing; removed in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import torch

_REPORT = """
from ddpilot.group.init_group import init_group
try:
    init_group(distributed=False)
except RuntimeError as error:
    print(type(error).__name__, error)
else:
    print("entered")
"""


def _run(take_away: str) -> str:
    done = subprocess.run([sys.executable, "-c", take_away + _REPORT], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def test_init_group_says_what_to_do_when_torch_distributed_is_missing() -> None:
    """A build without torch.distributed gives one sentence, not an ImportError from deep inside."""
    # What such a build has: no C part, so that nothing of torch.distributed beyond the package itself can be imported.
    take_away = """
import sys, torch, torch.distributed
torch.distributed.is_available = lambda: False
del torch._C._distributed_c10d
for name in [name for name in sys.modules if name.startswith(("torch.distributed.", "torch._C._distributed"))]:
    sys.modules[name] = None
"""
    said = _run(take_away)
    assert said == (
        "GroupError entering the group: this build of PyTorch has no torch.distributed. "
        "Install a build that has it: the official wheels for Linux, macOS and Windows do.\n"
    )


def test_init_group_says_what_to_do_when_gloo_is_missing() -> None:
    """A build without gloo gives one sentence that names the backends it has: none on a CPU build, nccl on others."""
    said = _run("import torch.distributed as dist\ndist.Backend.backend_list.remove('gloo')\n")
    has = "nccl" if torch.distributed.is_nccl_available() else "none"
    assert said.startswith(
        f"GroupError choosing device and backend: this build of PyTorch has no 'gloo' backend; it has: {has}. "
    )
