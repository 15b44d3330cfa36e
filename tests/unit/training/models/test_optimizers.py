# SPDX-License-Identifier: Apache-2.0
"""Gradients are cleared after an update as the optimizer clears them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddpilot.training.models.optimizers import clear_gradients


class Own(torch.optim.SGD):
    """Counts how often it is asked."""

    num_asked = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch does it."""
        self.num_asked += 1
        super().zero_grad(set_to_none)


@pytest.mark.usefixtures("compiler_is_loaded")
def test_clear_gradients_leaves_none() -> None:
    """In all groups of torch's own optimizers; one that clears them in its own way is asked to, a patched one too."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": [parameter]} for parameter in parameters]
    asked = []
    own, patched = Own(groups), torch.optim.SGD(groups)
    patched.zero_grad = lambda set_to_none=True: asked.append(set_to_none)  # type: ignore[method-assign]
    for optimizer in (torch.optim.SGD(groups), own):
        for parameter in parameters:
            parameter.grad = torch.ones(2)
        clear_gradients(optimizer)
        assert [parameter.grad for parameter in parameters] == [None, None]
    clear_gradients(patched)
    assert (own.num_asked, asked) == (1, [True])
