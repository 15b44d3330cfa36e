# SPDX-License-Identifier: Apache-2.0
"""Determine how a rank's process ended, and whether a live one is blocked by a collective.

Includes jobs that were ended as a whole from outside, so that no rank's end is reported as the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ddpilot.launching.exception_report import reads_like_victim
from ddpilot.record.flight_ring.log import Collective
from ddpilot.watch.snapshot.model import JobSnapshot, ProcessState, RankSnapshot
from ddpilot.watch.snapshot.stacks import is_waiting

State = Literal["alive", "finished", "died", "victim", "unknown"]
"""``victim``: it ended because another rank did, judging by its error; ``unknown``: nothing is known about it."""

_MAX_CHARS = 100
_STOPPING = ("SIGKILL", "SIGTERM", "SIGINT")
_BEAT_NS = 60_000_000
"""Slightly more than the interval between two heartbeats in a ring."""
_OUTLIVED_NS = 200_000_000
"""An error that another rank's exit causes may be raised this long before that exit is seen."""
_KILLING_NS = 500_000_000
"""Launchers send SIGKILL a second or more after SIGTERM. Ends that are seen together have no order within this time."""
_PATIENT_CALLS = ("send", "recv", "send_object_list", "recv_object_list")


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """The state of a rank, and its description."""

    state: State
    words: str = ""

    @property
    def is_gone(self) -> bool:
        """True if the rank will begin no more collectives."""
        return self.state in ("finished", "died", "victim")


def outcome_of(rank: RankSnapshot | None) -> RankOutcome:
    """Return the state of a rank; "unknown" for None."""
    if rank is None:
        return RankOutcome("unknown")
    error = rank.error
    if error is not None and error.type_name == "SystemExit" and error.message in ("", "0", "None"):
        return RankOutcome("finished", "has exited")
    if error is not None:
        line = next((line.strip() for line in error.message.splitlines() if line.strip()), "")
        line = line if len(line) <= _MAX_CHARS else f"{line[: _MAX_CHARS - 3]}..."
        words = f"raised {error.type_name}: {line}".removesuffix(": ")
        return RankOutcome("victim" if reads_like_victim(error.type_name, error.message) else "died", words)
    if rank.returned:
        is_cut = rank.process.exitcode == 0 and rank.log is not None and not rank.has_closed_log
        return RankOutcome("finished", "has exited without cleanup, as with os._exit(0)" if is_cut else "has returned")
    return _process_outcome(rank) if rank.process.state == "ended" else RankOutcome("alive")


def _process_outcome(rank: RankSnapshot) -> RankOutcome:
    process = rank.process
    if process.signal_name is not None:
        return RankOutcome("died", f"died of {process.signal_name}")
    if process.exitcode is not None and process.exitcode < 0:
        return RankOutcome("died", f"died of signal {-process.exitcode}")
    if process.exitcode:
        return RankOutcome("died", f"exited with status {process.exitcode}")
    if process.exitcode == 0 or rank.has_closed_log:
        return RankOutcome("finished", "has exited")
    return RankOutcome("died", "ended without closing the recording, as with a signal or os._exit")


def first_deaths(job: JobSnapshot, outcomes: Mapping[int, RankOutcome]) -> list[int]:
    """Return the ranks that died first: neither victims, nor ranks terminated after a different rank had died."""
    died = [rank for rank, outcome in outcomes.items() if outcome.state == "died"]
    of_itself = [rank for rank in died if job.ranks[rank].process.signal_name not in _STOPPING]
    if any(job.ranks[rank].error for rank in of_itself):
        return of_itself
    firsts = _killed_before(job, died, of_itself) or _earliest(job, of_itself or died)
    return _ended_before(job, outcomes, firsts) or firsts


def _killed_before(job: JobSnapshot, died: Sequence[int], of_itself: Sequence[int]) -> list[int]:
    """Return the ranks that SIGKILL ended before the others aborted; none if a launcher may have sent it.

    The watchdog of NCCL aborts a process if the connection to a peer is lost.
    """
    ends_ns = {rank: end for rank in died if (end := job.ranks[rank].process.ended_ns) is not None}
    signals = {rank: job.ranks[rank].process.signal_name for rank in died}
    if not of_itself or any(signals[rank] != "SIGABRT" or rank not in ends_ns for rank in of_itself):
        return []
    first_ns = min(ends_ns[rank] for rank in of_itself)
    killed = [rank for rank, end in ends_ns.items() if signals[rank] == "SIGKILL" and end < first_ns + _KILLING_NS]
    return _earliest(job, killed)


def _ended_before(job: JobSnapshot, outcomes: Mapping[int, RankOutcome], stopped: Sequence[int]) -> list[int]:
    """Return the victims that exited while all of `stopped` were running, if a launcher may have terminated `stopped`.

    The connection that such a victim lost was to something else, for example to a server of a download.
    """
    signs_ns = [_last_sign_ns(job.ranks[rank]) for rank in stopped if _may_be_stopped(job.ranks[rank])]
    lived_ns = [sign for sign in signs_ns if sign is not None]
    if not lived_ns or len(lived_ns) < len(stopped):
        return []
    victims = {rank: _last_sign_ns(job.ranks[rank]) for rank, outcome in outcomes.items() if outcome.state == "victim"}
    early = [rank for rank, end in victims.items() if end is not None and end + _OUTLIVED_NS < min(lived_ns)]
    return _earliest(job, early) if early else []


def _may_be_stopped(rank: RankSnapshot) -> bool:
    process = rank.process
    return process.signal_name in _STOPPING if process.signal_name is not None else process.exitcode is None


def _last_sign_ns(rank: RankSnapshot) -> int | None:
    """Return the time of the rank's exit, of the end of its recording or of its last heartbeat."""
    log = rank.log
    signs = (rank.process.ended_ns, *((log.closed_ns, log.heartbeat_ns) if log is not None else ()))
    return next((sign for sign in signs if sign is not None), None)


def _earliest(job: JobSnapshot, ranks: Iterable[int]) -> list[int]:
    ends = {rank: job.ranks[rank].process.ended_ns for rank in ranks}
    known = [end for end in ends.values() if end is not None]
    if not known:
        return _first_silent(job, list(ends))
    return [rank for rank, end in ends.items() if end is not None and end <= min(known) + 100_000_000]


def _first_silent(job: JobSnapshot, ranks: list[int]) -> list[int]:
    """Return the ranks whose heartbeats stopped first, for ranks whose end was not observed."""
    beats = {rank: log.heartbeat_ns for rank in ranks if (log := job.ranks[rank].log) is not None and log.heartbeat_ns}
    if len(beats) < len(ranks):
        return ranks
    return [rank for rank, beat in beats.items() if beat <= min(beats.values()) + _BEAT_NS]


def is_blocked_by(rank: RankSnapshot, outcome: RankOutcome, entry: Collective) -> bool | None:
    """Return True if the rank cannot continue before `entry` completes; None if only a current stack can tell.

    For a rank that has ended: True if it could not continue at that time.
    """
    is_over = entry.state == "done" or (entry.state == "unknown" and not entry.is_passed_over)
    if outcome.state == "finished" or (is_over and not entry.is_p2p):
        return False
    if outcome.is_gone:
        return True
    if entry.state == "failed":
        return False  # and the program continued
    if entry.is_p2p:
        # A call that returns at once and whose completion is not observed, as with NCCL, does not show where the rank
        # is.
        is_patient = entry.is_watched and entry.line is not None and entry.line.via in _PATIENT_CALLS
        return True if is_patient else is_waiting(rank.stack, entry)
    if not entry.is_watched and _may_end_alone(entry) and not _has_begun_more(rank, entry):
        return is_waiting(rank.stack, entry)
    if entry.ddp is not None or entry.is_async is not True:
        return True
    return is_waiting(rank.stack, entry)


def _may_end_alone(entry: Collective) -> bool:
    """True if this rank only sends in `entry`, so that it may complete before other ranks have begun it."""
    is_root = entry.group is not None and entry.root == entry.group.rank
    return (entry.op in ("broadcast", "scatter") and is_root) or (entry.op in ("reduce", "gather") and not is_root)


def _has_begun_more(rank: RankSnapshot, entry: Collective) -> bool:
    """True if the rank has begun a later collective of the group that cannot complete without the other ranks."""
    later = (each for each in rank.collectives if each.index > entry.index)
    return any(
        each.group == entry.group and not each.is_p2p and each.state == "begun" and not _may_end_alone(each)
        for each in later
    )


COMMON_END = (
    "all visible ranks were ended from outside at the same time: by a time limit, `scancel` or a kill of the whole job"
)
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM")


def before_common_end(job: JobSnapshot, outcomes: Mapping[int, RankOutcome]) -> JobSnapshot | None:
    """Return the job as it was when all of its ranks were ended at once from outside; None if they were not."""
    ranks = {number: rank for number, rank in job.ranks.items() if rank.process.state != "unknown"}
    if len(ranks) < 2 or not all(_was_ended(rank) for rank in ranks.values()):
        return None
    if len({rank.process.signal_name for rank in ranks.values()}) > 1 or set(first_deaths(job, outcomes)) != set(ranks):
        return None
    logs = {number: rank.log for number, rank in ranks.items() if rank.log is not None}
    ends_ns = [rank.process.ended_ns or logs[number].heartbeat_ns for number, rank in ranks.items()]
    known_ns = [each for each in ends_ns if each is not None]
    if len(known_ns) < len(ends_ns):
        return None
    before = {number: without_end(rank) for number, rank in ranks.items()}
    return replace(job, ranks={**job.ranks, **before}, now_ns=min(job.now_ns, max(known_ns)))


def _was_ended(rank: RankSnapshot) -> bool:
    process = rank.process
    is_over = rank.error is not None or rank.returned or rank.log is None or rank.has_closed_log
    if process.state != "ended" or is_over:
        return False
    return process.exitcode is None if process.signal_name is None else process.signal_name in _FROM_OUTSIDE


def without_end(rank: RankSnapshot) -> RankSnapshot:
    """Return `rank` as if it were not known how its process ended."""
    return replace(rank, process=ProcessState(pid=rank.process.pid, host=rank.process.host, state="unknown"))
