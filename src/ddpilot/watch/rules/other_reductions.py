# SPDX-License-Identifier: Apache-2.0
"""Whether something else than DDP averages parameters or gradients: local SGD, sharded optimizers, code by hand."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterable, Mapping

from ddpilot.record.log import Collective, RankLog

MIN_EXCHANGED = 32
"""Elements of a collective, or of a point-to-point operation, that is no metric: parts of one model in every other step
talk like this."""

_EXCHANGES = re.compile(
    r"reduce|broadcast|gather|scatter|send|recv|exchang|averag|avg(?!_?pool)|sync|merg|mix|shar(e|ing)|gossip|consensus|"
    r"fed|diloco|local_?sgd|outer|ensemble|member|fold|replica|independent|island|population",
    re.IGNORECASE,
)
"""Words of programs whose ranks train apart on purpose, for a while or for ever."""


def is_never_exchanged(files: Iterable[str], texts: Mapping[str, str]) -> bool:
    """True if the user's `files` are known, and nothing in them suggests that ranks exchange or mean to train apart.

    `texts`: of those that lie in no file, by name.
    """
    sources = [texts.get(file) or "".join(linecache.getlines(file)) for file in files if file]
    return bool(sources) and all(source and not _EXCHANGES.search(source) for source in sources)


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
