# SPDX-License-Identifier: Apache-2.0
"""Messages about dead ranks, failed devices and a lost store, each with the command that recovers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpilot.errors import LaunchError, RankError
from ddpilot.findings.text import render_ranks
from ddpilot.session.kernels.events import Ended

SERVER_GONE = "ended with the rank server"
BEGIN_ANEW = "`%ddp stop`, then `%ddp start` (a new `Session`) starts from scratch"
"""What to do if no rank can be started any more."""


STORE_GONE = "the process of the session's store ended"


def describe_store_end(ended: Ended) -> str:
    """Describe the end of the session's store, which ranks need to form a group, or of the session's own thread."""
    if ended.exited is None:
        return ended.reason
    status = ended.exited
    how = f"was killed by {status.signal_name}" if status.signal_name else f"exited with code {status.exitcode}"
    return f"{STORE_GONE} (it {how}): ranks cannot form a process group any more, variables are kept"


def make_dead_error(did: str, ranks: Sequence[int], dead: Mapping[int, str], *, can_restart: bool) -> LaunchError:
    """Build the error for `did`, which needs `ranks`. `dead` has the cause of death of each of them."""
    again = f"`%ddp restart {' '.join(map(str, ranks))}` starts {_them(ranks)} again, and so does `session.restart`"
    return LaunchError(
        did,
        found="; ".join(f"rank {rank} is dead: it {dead[rank]}" for rank in ranks),
        fix=again if can_restart else BEGIN_ANEW,
        rank=ranks[0],
    )


def blame_dead(error: RankError, dead: Mapping[int, str]) -> None:
    """Rewrite `error` to name the dead ranks that the failed rank needed. `dead` has their causes of death by rank."""
    gone = ", ".join(f"rank {rank}, which is dead (it {dead[rank].partition(';')[0]})" for rank in sorted(dead))
    error.found = f"rank {error.rank} needed {gone}"
    error.fix = f"`%ddp restart {' '.join(map(str, sorted(dead)))}` brings {_them(sorted(dead))} back"
    error.others = ""
    error.args = (error.render(),)


def describe_death(rank: int, reason: str, respawns: bool) -> str:
    """Describe the death of a rank while no cell was running on it."""
    again = "the next cell restarts it" if respawns else f"`%ddp restart {rank}` brings it back"
    return f"rank {rank} {reason}; its variables are lost, {again}"


def describe_device_error(rank: int, text: str, respawns: bool) -> str:
    """Describe a rank whose device accepts no more work. `text` is the error that the device returns."""
    again = "it is restarted" if respawns else f"`%ddp restart {rank}` starts it again"
    where = "; `CUDA_LAUNCH_BLOCKING=1` in `env` shows the line that did it" if "CUDA" in text else ""
    return (
        f"rank {rank}: its device has failed and runs nothing more ({text}); what is in the device's memory is lost, "
        f"{again}{where}"
    )


def describe_absent(dead: Mapping[int, str], live: Sequence[int]) -> str:
    """Describe why a cell runs on the ranks in `live` only: the others are dead."""
    ranks = sorted(dead)
    causes = ", ".join(f"rank {rank} is dead (it {dead[rank].partition(';')[0]})" for rank in ranks)
    again = f"`%ddp restart {' '.join(map(str, ranks))}` brings {_them(ranks)} back"
    return f"{causes}: this cell runs on {render_ranks(live)}; {again}"


def _them(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"
