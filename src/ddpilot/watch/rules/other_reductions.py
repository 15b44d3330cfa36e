# SPDX-License-Identifier: Apache-2.0
"""Whether something else than DDP averages parameters or gradients: local SGD, sharded optimizers, code by hand."""

from __future__ import annotations

import math

from ddpilot.record.log import Collective, RankLog


def find_reduction(log: RankLog, since_ns: int, num_elements: int) -> Collective | None:
    """A collective of no DDP model since `since_ns` that moved `num_elements` or more; None: there was none.

    Point-to-point operations count too: gossip averages with them.
    """
    for collective in reversed(log.collectives):
        if collective.start_ns < since_ns:
            return None
        if collective.ddp is None and _num_elements(collective) >= num_elements:
            return collective
    return None


def _num_elements(collective: Collective) -> int:
    tensors = (*collective.inputs, *collective.outputs)
    return sum(math.prod(tensor.shape) for tensor in tensors)
