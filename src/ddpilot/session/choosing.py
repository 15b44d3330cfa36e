# SPDX-License-Identifier: Apache-2.0
"""Resolve the `ranks` argument of a session's methods."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ddpilot.errors import LaunchError
from ddpilot.session.arguments import check_rank, check_ranks
from ddpilot.session.deaths import make_dead_error

if TYPE_CHECKING:
    from ddpilot.session.kernels.manager import Ranks


def choose(ranks: Ranks, asked: Iterable[int] | None, did: str, *, all_live: bool = False) -> tuple[int, ...]:
    """Return the ranks that `did` runs on: `asked`, or all live ranks if `asked` is None.

    With `all_live`, None requires that every rank is alive. If the session respawns ranks, dead ranks count as live.
    Raises LaunchError if a required rank is dead, if no rank is live, or if the session was stopped.
    """
    if ranks.is_closed:
        raise LaunchError(did, found="the session was stopped", fix="Start a new one")
    dead, respawns = ranks.standing.dead, ranks.options.respawn
    chosen = tuple(range(ranks.world_size)) if asked is None else check_ranks(asked, ranks.world_size, did)
    missing = [rank for rank in chosen if rank in dead]
    if respawns or not missing:
        return chosen
    if asked is None and not all_live and len(missing) < ranks.world_size:
        return tuple(rank for rank in chosen if rank not in dead)
    raise make_dead_error(did, missing, dead, can_restart=ranks.host.can_start)


def choose_one(ranks: Ranks, rank: int | None, did: str) -> tuple[int, ...]:
    """Return `rank` as a tuple, or all ranks if it is None. Raises LaunchError if one of them is dead."""
    if rank is None:
        return choose(ranks, None, did, all_live=True)
    return choose(ranks, [check_rank(rank, ranks.world_size, did, "Give the number of one rank, or None")], did)
