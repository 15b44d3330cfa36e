# SPDX-License-Identifier: Apache-2.0
"""Detect averaging of parameters or gradients without DDP: local SGD, sharded optimizers, the program's own code."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterable, Mapping

from ddpilot.record.flight_ring.log import Collective, RankLog

MIN_EXCHANGED = 32
"""A collective or point-to-point operation of this many elements is not a metric.
Ranks that hold parts of one model exchange this much in at least every second step.
"""

_EXCHANGES = re.compile(
    r"reduce|broadcast|gather|scatter|send|recv|exchang|averag|avg(?!_?pool)|sync|merg|mix|shar(e|ing)|gossip|consensus|"
    r"fed|diloco|local_?sgd|outer|ensemble|member|fold|replica|independent|island|population",
    re.IGNORECASE,
)
"""Words in programs whose ranks train separately on purpose, temporarily or permanently."""


def is_never_exchanged(files: Iterable[str], texts: Mapping[str, str]) -> bool:
    """Return True if the user's `files` are known and nothing in them suggests an exchange or separate training.

    `texts`: by name, sources that are not in a file.
    """
    sources = [texts.get(file) or "".join(linecache.getlines(file)) for file in files if file]
    return bool(sources) and all(source and not _EXCHANGES.search(source) for source in sources)


def may_be_reduced(log: RankLog, since_ns: int, num_elements: int) -> bool:
    """Return True if a collective outside DDP since `since_ns` moved at least `num_elements`, or may have.

    It may have if the log no longer reaches back that far. Point-to-point operations count too: gossip averages with
    them.
    """
    for collective in reversed(log.collectives):
        if collective.start_ns < since_ns:
            return False
        if collective.ddp is None and _num_elements(collective) >= num_elements:
            return True
    return bool(log.collectives) and log.collectives[0].index > 1


def num_exchanged(log: RankLog, since_ns: int, num_elements: int) -> int:
    """Count collectives and point-to-point operations outside DDP since `since_ns` of at least `num_elements`."""
    count = 0
    for collective in reversed(log.collectives):
        if collective.start_ns < since_ns:
            break
        count += collective.ddp is None and _num_elements(collective) >= num_elements
    return count


def _num_elements(collective: Collective) -> int:
    tensors = (*collective.inputs, *collective.outputs)
    return sum(math.prod(tensor.shape) for tensor in tensors)
