# SPDX-License-Identifier: Apache-2.0
"""Whether something else than DDP averages parameters or gradients: local SGD, sharded optimizers, code by hand."""

from __future__ import annotations

import math

from ddpilot.record.log import Collective, RankLog

MIN_EXCHANGED = 32
"""Elements of a collective, or of a point-to-point operation, that is no metric: parts of one model in every other step
talk like this."""


def may_be_reduced(log: RankLog, since_ns: int, num_elements: int) -> bool:
    """Whether a collective of no DDP model since `since_ns` moved `num_elements` or more, or may have: it is forgotten.

    Point-to-point operations count too: gossip averages with them.
    """
    for collective in reversed(log.collectives):
        if collective.start_ns < since_ns:
            return False
        if collective.ddp is None and _num_elements(collective) >= num_elements:
            return True
    return bool(log.collectives) and log.collectives[0].index > 1


def num_exchanged(log: RankLog, since_ns: int, num_elements: int) -> int:
    """How many collectives and point-to-point operations since `since_ns` moved `num_elements` or more, DDP's apart."""
    count = 0
    for collective in reversed(log.collectives):
        if collective.start_ns < since_ns:
            break
        count += collective.ddp is None and _num_elements(collective) >= num_elements
    return count


def _num_elements(collective: Collective) -> int:
    tensors = (*collective.inputs, *collective.outputs)
    return sum(math.prod(tensor.shape) for tensor in tensors)
