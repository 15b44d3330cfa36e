# SPDX-License-Identifier: Apache-2.0
"""What a run is changed in: the parts of ranks, numbers of tensors, and random numbers that are alike."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DistributedSampler

from ddpilot.diagnose.updates.changes import divide
from ddpilot.diagnose.updates.draws import DrawAlike
from ddpilot.diagnose.updates.probe import thin


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("drop_last", [True, False])
def test_parts_are_those_of_distributed_sampler(length: int, drop_last: bool) -> None:
    """Also padded ones, and where the dataset has fewer samples than there are ranks."""
    parts = divide(list(range(length)), 4, drop_last=drop_last and length >= 4)
    for rank in range(4):
        sampler: DistributedSampler[int] = DistributedSampler(
            range(length),  # type: ignore[arg-type]
            num_replicas=4,
            rank=rank,
            shuffle=False,
            drop_last=drop_last and length >= 4,
        )
        assert parts[rank] == list(sampler)


def test_thin_keeps_some_elements_their_sum_and_norm() -> None:
    """Small tensors whole; complex and sparse ones too."""
    small = torch.tensor([[3.0, -4.0]], dtype=torch.bfloat16)
    assert thin(small).tolist() == [3.0, -4.0, -1.0, 5.0]
    large = torch.arange(10_001.0)
    kept = thin(large)
    assert len(kept) <= 4096 + 2
    assert kept[-2] == float(large.double().sum())
    assert thin(torch.tensor([1 + 2j])).tolist()[:2] == [1.0, 2.0]
    assert thin(torch.eye(2).to_sparse()).tolist()[:4] == [1.0, 0.0, 0.0, 1.0]
    assert thin(torch.empty(0)).tolist() == [0.0, 0.0]


@pytest.fixture(autouse=True)
def compiler_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch sets this variable the first time that a dispatch mode is entered."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


DRAWS = {
    "randn": lambda num: torch.randn(num, 3),
    "rand": lambda num: torch.rand(num),
    "randint": lambda num: torch.randint(100, (num, 2)),
    "randint from 5": lambda num: torch.randint(5, 100, (num, 2)),
    "randn_like": lambda num: torch.randn_like(torch.ones(num, 3)),
    "normal_": lambda num: torch.empty(num, 3).normal_(1.0, 2.0),
    "uniform_": lambda num: torch.empty(num, 3).uniform_(-1, 1),
    "exponential_": lambda num: torch.empty(num, 3).exponential_(),
    "bernoulli": lambda num: torch.bernoulli(torch.full((num, 3), 0.5)),
    "bernoulli_": lambda num: torch.empty(num, 3).bernoulli_(0.5),
    "normal": lambda num: torch.normal(torch.zeros(num, 3), torch.ones(num, 3)),
    "Normal": lambda num: torch.distributions.Normal(torch.zeros(num, 3), 1.0).rsample(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_rows_are_alike_whatever_their_number(name: str) -> None:
    """So that 16 rows on one rank have the numbers of 8 on each of two."""
    torch.manual_seed(0)
    with DrawAlike() as mode:
        assert not torch.equal(*DRAWS[name](2).float()) or name in ("bernoulli", "bernoulli_")
        mode.is_active = True
        few, many = DRAWS[name](2), DRAWS[name](16)
    assert all(torch.equal(row, many[0]) for row in (*few, *many))


def test_generators_of_the_program_and_permutations_of_samples_are_left() -> None:
    """A permutation of the rows of a batch is the identity."""
    with DrawAlike() as mode:
        mode.is_active, mode.num_rows = True, 8
        generator = torch.Generator().manual_seed(3)
        own = torch.randn(4, 2, generator=generator)
        assert torch.randperm(8).tolist() == list(range(8))
        assert sorted(torch.randperm(100).tolist()) == list(range(100))
        assert torch.randperm(100).tolist() != list(range(100))
    assert torch.equal(own, torch.randn(4, 2, generator=generator.manual_seed(3)))


def test_state_of_the_generator_does_not_change_when_rows_are_alike() -> None:
    """One rank and several have the same state after any number of draws."""
    state = torch.get_rng_state()
    with DrawAlike() as mode:
        mode.is_active = True
        torch.randn(8, 2)
    assert numpy.array_equal(state.numpy(), torch.get_rng_state().numpy())
