# SPDX-License-Identifier: Apache-2.0
"""What is said of ranks that are dead when something is asked of them, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpilot.errors import LaunchError, RankError
from ddpilot.findings.words import render_ranks
from ddpilot.session.events import Ended

SERVER_GONE = "ended with the rank server"
BEGIN_ANEW = "`%ddp stop`, then `%ddp start` (a new `Session`) starts from scratch"
"""What to do where no rank can be started any more."""


STORE_GONE = "the process of the session's store ended"


def describe_store_end(ended: Ended) -> str:
    """For the end of the session's store, in which ranks meet to form a group; or of the thread that serves them."""
    if ended.exited is None:
        return ended.reason
    status = ended.exited
    how = f"was killed by {status.signal_name}" if status.signal_name else f"exited with code {status.exitcode}"
    return f"{STORE_GONE} (it {how}): ranks cannot form a process group any more, variables are kept"


def make_dead_error(did: str, ranks: Sequence[int], dead: Mapping[int, str], *, can_restart: bool) -> LaunchError:
    """For `did`, which needs `ranks`, all of them in `dead`: of what they died, by rank."""
    again = f"`%ddp restart {' '.join(map(str, ranks))}` starts {_them(ranks)} again, and so does `session.restart`"
    return LaunchError(
        did,
        found="; ".join(f"rank {rank} is dead: it {dead[rank]}" for rank in ranks),
        fix=again if can_restart else BEGIN_ANEW,
        rank=ranks[0],
    )


def blame_dead(error: RankError, dead: Mapping[int, str]) -> None:
    """Let `error` begin with the ranks in `dead`, which what failed on its rank needed: by rank, of what they died."""
    gone = ", ".join(f"rank {rank}, which is dead (it {dead[rank].partition(';')[0]})" for rank in sorted(dead))
    error.found = f"rank {error.rank} needed {gone}"
    error.fix = f"`%ddp restart {' '.join(map(str, sorted(dead)))}` brings {_them(sorted(dead))} back"
    error.others = ""
    error.args = (error.render(),)


def describe_death(rank: int, reason: str, respawns: bool) -> str:
    """For a rank that dies while nothing runs on it."""
    again = "the next cell restarts it" if respawns else f"`%ddp restart {rank}` brings it back"
    return f"rank {rank} {reason}; its variables are lost, {again}"


def describe_device_error(rank: int, text: str, respawns: bool) -> str:
    """For a rank whose device does nothing any more: `text` is what it answers."""
    again = "it is restarted" if respawns else f"`%ddp restart {rank}` starts it again"
    where = "; `CUDA_LAUNCH_BLOCKING=1` in `env` shows the line that did it" if "CUDA" in text else ""
    return (
        f"rank {rank}: its device has failed and runs nothing more ({text}); what is in the device's memory is lost, "
        f"{again}{where}"
    )


def describe_absent(dead: Mapping[int, str], live: Sequence[int]) -> str:
    """For a cell that runs on the ranks that `live`, since others are dead."""
    ranks = sorted(dead)
    causes = ", ".join(f"rank {rank} is dead (it {dead[rank].partition(';')[0]})" for rank in ranks)
    again = f"`%ddp restart {' '.join(map(str, ranks))}` brings {_them(ranks)} back"
    return f"{causes}: this cell runs on {render_ranks(live)}; {again}"


def _them(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"
