# SPDX-License-Identifier: Apache-2.0
"""Find the batch that a forward uses by its tensors."""

from __future__ import annotations

import torch

from ddpilot.guard.probes.data.loaders import _describe_batch, pointers_of
from ddpilot.guard.probes.data.position import Pass, Position


def test_find_given_ignores_the_address_of_a_batch_that_was_freed() -> None:
    """Its memory may be that of `x + noise`, computed from the newest batch."""
    position = Position()
    found = Pass(loader=1, number=1, length=None, num_workers=0, site={}, sketch=None)
    kept, freed, newest = (torch.randn(4) for _ in range(3))
    for number, batch in enumerate((kept, freed, newest), start=1):
        position.batches.append(_describe_batch(found, number, None, (batch,)))
    address = pointers_of(freed)
    first = position.batches[0]
    assert position.find_batch(pointers_of([kept.view(2, 2)])) is first
    assert position.find_batch(address) is position.batches[1]
    del freed, batch
    assert position.find_batch(address) is position.batches[2]
    assert position.find_batch(frozenset()) is position.batches[2]
