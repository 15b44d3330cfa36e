# SPDX-License-Identifier: Apache-2.0
"""Options of a session are validated on construction."""

from __future__ import annotations

from typing import Any

import pytest

from ddpilot.errors import LaunchError
from ddpilot.session.options import SessionOptions, choose_visible


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"nproc_per_node": 0}, "`nproc_per_node`"),
        ({"nproc_per_node": 3, "gpus": (0, 1)}, "3 ranks for 2 GPUs"),
        ({"gpus": (-1,)}, "`gpus`"),
        ({"gpus": "0,1"}, "`gpus`"),
        ({"hosts": "node1"}, r"`hosts=\('node1',\)`"),
        ({"hosts": ("-oProxyCommand=x",)}, "'-oProxyCommand=x'"),
        ({"hosts": ("a",), "slurm": True}, "both `hosts` and `slurm`"),
        ({"hosts": ("a",), "gpus": (0,)}, "numbers the GPUs of this machine"),
        ({"nodes": 2}, "2, without `slurm`"),
        ({"slurm_options": {"time": "5"}}, "{'time': '5'}, without `slurm`"),
        ({"slurm": True, "nodes": 0}, "`nodes`"),
        ({"slurm": True, "slurm_options": {"nodes": "2"}}, "`nodes`, which the session sets itself"),
        ({"slurm": True, "slurm_options": {"time": 5}}, "`slurm_options`"),
        ({"apps": "fastai"}, r"`apps=\('fastai',\)`"),
        ({"preload": "numpy"}, r"`preload=\('numpy',\)`"),
        ({"seed": -1}, "`seed`"),
        ({"seed": 1.5}, "`seed`"),
        ({"env": {"A": 1}}, "`env`"),
        ({"output": "loud"}, "`output`"),
        ({"output_limit_bytes": -1}, "`output_limit_bytes`"),
    ],
)
def test_session_options_refuse_what_cannot_be_meant(options: dict[str, Any], found: str) -> None:
    """With the name of the option."""
    with pytest.raises(LaunchError, match=found):
        SessionOptions(**options)


def test_launch_options_make_the_chosen_gpus_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA counts them; without a choice the environment stays as it is."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert SessionOptions(gpus=(2, 3), env={"A": "1"}).launch_options().env == {"A": "1", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert SessionOptions().launch_options().env == {}


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [((0,), "2,3", "2"), ((1, 0), "2, GPU-aa", "GPU-aa,2"), ((2,), None, "2"), ((5,), "2,3", "5"), ((0,), "", "")],
)
def test_gpus_are_counted_among_visible_ones(gpus: tuple[int, ...], visible: str | None, expected: str) -> None:
    """A scheduler has set CUDA_VISIBLE_DEVICES: number 0 is the first GPU in it, not GPU 0 of the machine."""
    assert choose_visible(gpus, visible) == expected


def test_launch_options_choose_gpus_among_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable in `env`, else in this process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert SessionOptions(gpus=(0, 2)).launch_options().env == {"CUDA_VISIBLE_DEVICES": "4,6"}
    options = SessionOptions(gpus=(1,), env={"CUDA_VISIBLE_DEVICES": "7,8"})
    assert options.launch_options().env == {"CUDA_VISIBLE_DEVICES": "8"}
