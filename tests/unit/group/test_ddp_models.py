# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of parameters, and the sentences about parameters that differ across ranks."""

from __future__ import annotations

import pytest
import torch

from ddpilot.group import ddp_models
from ddpilot.group.ddp_models import fingerprint


def test_fingerprint_is_equal_for_equal_parameters_of_any_kind() -> None:
    """Copies agree, whatever their dtype, layout in memory or size."""
    for tensor in (torch.ones(3, 2).t(), torch.ones((), dtype=torch.bfloat16), torch.ones(0), torch.ones(2) * 1j):
        module, copy = torch.nn.Module(), torch.nn.Module()
        module.weight = torch.nn.Parameter(tensor)
        copy.weight = torch.nn.Parameter(tensor.clone(memory_format=torch.contiguous_format))
        assert fingerprint(module) == fingerprint(copy)


def test_fingerprint_differs_for_the_last_bit_and_for_the_dtype() -> None:
    """The smallest possible change is detected, and so is the same value in a different dtype."""
    module = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    before = fingerprint(module)
    with torch.no_grad():
        module.weight[0, 1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert fingerprint(module).keys() == before.keys() == {"weight"}
    assert fingerprint(module) != before
    zeros = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(zeros.weight)
    in_half = fingerprint(zeros.half())
    assert fingerprint(zeros.bfloat16()) != in_half


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(700.0).reshape(7, 100),
        torch.ones(2000),
        torch.arange(9, dtype=torch.bfloat16),
        torch.arange(6, dtype=torch.int64),
        torch.arange(4).to(torch.complex128),
        torch.zeros(0),
    ],
)
def test_mix_sees_what_a_device_would_be_asked_for(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal for copies in any layout and in any number of pieces; different for swapped, scaled and single values."""
    number = ddp_models._mix(tensor)
    assert number == ddp_models._mix(tensor.t().clone().t() if tensor.dim() == 2 else tensor.clone())
    monkeypatch.setattr(ddp_models, "_CHUNK_WORDS", 64)
    assert number == ddp_models._mix(tensor)
    if tensor.numel():
        changed = [tensor * 2, tensor + 1]
        is_constant = bool((tensor == tensor.flatten()[0]).all())
        changed += [] if is_constant else [tensor.flatten().flip(0)]
        changed.append(torch.cat([tensor.flatten()[:-1], tensor.flatten()[-1:] * 3 + 1]))
        assert all(ddp_models._mix(each) != number for each in changed)
