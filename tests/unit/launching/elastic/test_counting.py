# SPDX-License-Identifier: Apache-2.0
"""How many ranks."""

from __future__ import annotations

import pytest

from ddpilot.errors import LaunchError
from ddpilot.launching.elastic import counting
from ddpilot.launching.elastic.counting import count_ranks
from ddpilot.launching.rank_environment import count_cores


@pytest.mark.parametrize(
    ("asked", "num_gpus", "found", "said"),
    [
        ("auto", 4, 4, ""),
        ("auto", 0, 1, "no GPU found, so one rank runs on the CPU; -n 2 gives two of them"),
        ("gpu", 2, 2, ""),
        ("cpu", 2, count_cores(), ""),
        (3, 0, 3, ""),
        (2, 2, 2, ""),
        (3, 2, 3, "3 ranks on 2 GPUs: `init_group()` lets them share, over gloo; NCCL refuses two ranks on one GPU"),
    ],
)
def test_count_ranks_means_what_the_machine_has(
    asked: int | str, num_gpus: int, found: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word becomes a number; what may surprise is said."""
    monkeypatch.setattr(counting, "count_accelerators", lambda _: num_gpus)
    notes: list[str] = []
    assert count_ranks(asked, {}, notes.append) == found
    assert [note[: len(said)] for note in notes] == ([said] if said else [])


def test_count_ranks_refuses_gpu_when_none_is_visible() -> None:
    """The variable that hides them is quoted."""
    with pytest.raises(LaunchError, match=r"no GPU is visible \(CUDA_VISIBLE_DEVICES=''\)"):
        count_ranks("gpu", {"CUDA_VISIBLE_DEVICES": ""}, print)
