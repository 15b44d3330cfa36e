# SPDX-License-Identifier: Apache-2.0
"""States of random number generators."""

from __future__ import annotations

import pytest
import torch

from ddpilot.guard.probes.data.random_draws import words_between


@pytest.mark.parametrize(("num_before", "num_drawn"), [(0, 0), (10, 1), (10, 600), (600, 100), (3, 2000)])
def test_words_are_counted_from_states_alone(num_before: int, num_drawn: int) -> None:
    """Exact within two blocks of the generator, a lower bound beyond."""
    generator = torch.Generator().manual_seed(1)
    torch.randint(9, (1 + num_before,), generator=generator)
    before = generator.get_state()
    torch.randint(9, (num_drawn,), generator=generator)
    assert min(num_drawn, 600) <= words_between(before, generator.get_state()) <= num_drawn
