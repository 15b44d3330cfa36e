# SPDX-License-Identifier: Apache-2.0
"""torch elastic's agent, extended to find the first failure, terminate ranks and report to the other nodes.

`PipedLogs` gives torch the destinations of output and reports. `EarlyNotice` shows one line with the reason for which
ranks are being terminated; the full report follows once they have exited.
"""

from __future__ import annotations

import platform
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext

from ddpilot.errors import DdpilotError, LaunchError, RankError, RendezvousError, WatchError
from ddpilot.findings.text import render_ranks
from ddpilot.launching.elastic.node_ranks import FAILED_GRACE_S, NodeRank, NodeRanks
from ddpilot.launching.elastic.options import OutputClosedError, RunOptions
from ddpilot.launching.elastic.output_thread import OutputThread, Pipe
from ddpilot.launching.elastic.rank_main import HOOKS_VARIABLE
from ddpilot.launching.elastic.rendezvous.node_state import NodeState
from ddpilot.launching.elastic.rendezvous.static_rendezvous import StaticRendezvousHandler
from ddpilot.launching.first_failure import build_error, choose_failure, find_child_errors, find_raised_line
from ddpilot.launching.observer import LaunchObserver, MakeObserver

_CAUSE_ELSEWHERE_S = 2.0
"""Seconds that a victim waits for a different node to report the cause."""

_HEARTBEAT_AFTER_S = 1.0
_LOST_AFTER_S = 3.5
"""To decide whether a victim's cause is on a different node: a node that sends a heartbeat more than
`_HEARTBEAT_AFTER_S` after the failure is alive; one that sends none until `_LOST_AFTER_S` after it is lost."""


class Agent(LocalElasticAgent):
    """The elastic agent of this node. `rendezvous`: None if a backend of torch is used."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: PipedLogs,
        options: RunOptions,
        screen: OutputThread,
        rendezvous: StaticRendezvousHandler | None,
    ) -> None:
        super().__init__(spec, logs)
        self._logs = logs
        self._options = options
        self._screen = screen
        self._static = rendezvous
        self.ranks = NodeRanks([], screen.note)
        """The ranks of this node in the current attempt."""
        self._notice = EarlyNotice(screen.note)
        self._has_forwarded = False
        self._requeue_seen_s: float | None = None
        self._shown_findings: list[tuple[str, str]] = []
        self.report: Path | None = None
        """Report file of the rank that failed first, if it is on this node and raised; otherwise None."""
        self.error: DdpilotError | None = None
        """Error of the last attempt; None while it is running and if it succeeded."""

    # called by torch's agent

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        assert isinstance(self._pcontext, SubprocessContext)
        handlers = self._pcontext.subprocess_handlers
        self.error = self._requeue_seen_s = None
        self._notice = EarlyNotice(self._screen.note)
        ranks = [
            NodeRank(
                rank=worker.global_rank,
                process=handlers[worker.local_rank].proc,
                report=Path(self._pcontext.error_files[worker.local_rank]),
            )
            for worker in worker_group.workers
        ]
        self.ranks = NodeRanks(ranks, self._screen.note)
        self._logs.observer.begin(ranks, {})
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.ranks.poll()
        if self._screen.broken is not None:
            self.ranks.end(signal.SIGTERM, FAILED_GRACE_S)
            raise _describe_broken(self._screen.broken)
        failures = self.ranks.failures()
        if self._may_follow_elsewhere():
            return RunResult(state=WorkerState.HEALTHY)
        if all(each.is_victim for each in failures) and self._saw_failure_elsewhere():
            self.ranks.end(signal.SIGTERM, FAILED_GRACE_S)
            return RunResult(state=WorkerState.UNHEALTHY)
        if self._static is not None and (failures or self.ranks.live) and self._requeue_seen_s is None:
            self._check_nodes(self._static)  # node 0 takes the store along when it exits to be requeued
        chosen = self._choose(failures)
        if chosen is not None and self._is_ending(chosen):
            if self._notice.is_due(time.monotonic() - chosen.since_s):
                self._notice.show(self._explain(chosen, worker_group))
        elif chosen is not None:
            self.report = chosen.report if chosen.report.exists() else None
            self._end_with(self._explain(chosen, worker_group))
        error = self._logs.observer.take(self._screen.note)
        if error is not None and not failures and self.error is None:
            self._end_with(error)
        if self.ranks.live or (failures and self.error is None):
            # A failure may be a victim whose cause is reported soon. torch's method is not called before the end,
            # because it would reap a rank between two of our checks and terminate the other ranks by its own rules.
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        total = worker_group.spec.max_restarts
        why = "the nodes have changed" if self.error is None else self.error.found.splitlines()[0]
        self._screen.note(f"restart {total - self._remaining_restarts} of {total}: {why}")
        self._show_findings()
        super()._restart_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **options: Any) -> None:
        if self.ranks.live:
            self._forward(death_sig)
        super()._shutdown(death_sig, *args, **options)

    def _exit_barrier(self) -> None:
        if self._static is None:
            super()._exit_barrier()  # type: ignore[no-untyped-call]
            return
        self._static.wait_until_all_are_done(self._saw_failure_elsewhere)

    # ddpilot's own logic

    def _show_findings(self) -> None:
        """Show the findings about the attempt that failed, unless the previous attempt failed with the same ones."""
        findings = self.error.findings if isinstance(self.error, (RankError, WatchError)) else ()
        keys = [(finding.code, finding.summary) for finding in findings]
        if findings and keys != self._shown_findings:
            self._screen.note(str(findings))
            self._shown_findings = keys

    def _choose(self, failures: Sequence[NodeRank]) -> NodeRank | None:
        now = time.monotonic()
        chosen = choose_failure(failures, now, self.ranks.silent_pids)
        if chosen is None or not chosen.is_victim or self._static is None or self._options.nnodes[1] == 1:
            return chosen
        waited_s = now - min(each.since_s for each in failures)
        if waited_s <= _CAUSE_ELSEWHERE_S:
            return None
        silent = self._static.silent_nodes(waited_s - _HEARTBEAT_AFTER_S)
        if silent and waited_s > _LOST_AFTER_S:
            self._end_by_silence(self._static, silent[0], chosen)
        return None if silent else chosen

    def _end_by_silence(self, rendezvous: StaticRendezvousHandler, node: NodeState, victim: NodeRank) -> NoReturn:
        """Terminate because of a lost node, which a rank here noticed first through a closed connection."""
        failed = [each.rank for each in self.ranks.failures()]
        self.ranks.end(signal.SIGTERM, FAILED_GRACE_S)
        assert victim.raised is not None  # a rank that exited without an exception is never a victim
        how = " ".join([f"{victim.raised.type_name}:", *victim.raised.message.splitlines()[:1]])
        self.error = RendezvousError(
            f"watching {node.place}",
            found=f"no heartbeat since {render_ranks(failed)} lost a connection to it and failed ({how})",
            fix="Check the output of `ddpilot run` on that node: it was killed, or the machine or its network failed",
        )
        rendezvous.report_failure(self.error)
        raise self.error

    def _end_with(self, error: DdpilotError) -> None:
        """Terminate the ranks because of `error`, and report it to the other nodes."""
        self.error = error
        self.ranks.end(signal.SIGTERM, FAILED_GRACE_S, partial(self._notice.show, error))
        if self._static is not None:
            self._static.report_failure(error)

    def _is_ending(self, chosen: NodeRank) -> bool:
        """True while `chosen` is exiting, or the other ranks of a `Loop` may still exit with the requeue code too."""
        limit_s = self._options.shutdown_timeout_s
        follow = chosen.exited is not None and self.ranks.are_leaving(chosen.since_s, limit_s)
        return follow or self.ranks.is_leaving(chosen)

    def _may_follow_elsewhere(self) -> bool:
        """True while the ranks here may still exit with the requeue code, as ranks of a different node did."""
        if self._static is None or not self._static.is_requeue_elsewhere:
            return False
        if self._requeue_seen_s is None:
            self._requeue_seen_s = time.monotonic()
        return self.ranks.are_leaving(self._requeue_seen_s, self._options.shutdown_timeout_s)

    def _explain(self, chosen: NodeRank, worker_group: WorkerGroup) -> RankError:
        """Build the error for one rank's failure from what is known now."""
        victims = [each.rank for each in self.ranks.failures() if each.rank != chosen.rank and each.is_victim]
        raised, last_lines = chosen.raised, self._screen.last_lines(chosen.rank)
        error = build_error(
            chosen,
            function_name=self._options.name,
            num_ranks=worker_group.workers[0].world_size,
            last_lines=last_lines if raised is None else find_child_errors(raised, last_lines),
            victims=victims,
            returned=self.ranks.succeeded,
            is_script=True,
        )
        self._logs.observer.explain(error)
        return error

    def _saw_failure_elsewhere(self) -> bool:
        if self._static is None:
            return False
        failed = [each.rank for each in self.ranks.failures()]
        live = [rank for rank in self.ranks.live if rank not in failed]
        states = [f"{render_ranks(failed)} failed as a result"] * bool(failed)
        states += [f"{render_ranks(live)} terminated"] * bool(live)
        here = f"On this node, {' and '.join(states)}." if states else "The ranks on this node had succeeded."
        self.error = self._static.failure_elsewhere(here)
        return self.error is not None

    def _check_nodes(self, rendezvous: StaticRendezvousHandler) -> None:
        try:
            rendezvous.check()
        except DdpilotError as error:
            self.error = error
            self.ranks.end(signal.SIGTERM, FAILED_GRACE_S)
            raise

    def _forward(self, death_sig: signal.Signals) -> None:
        """Forward a signal and give the ranks time to exit; a second signal kills them, even during that wait.

        The exception of the second signal propagates through torch's agent, which calls this method again.
        """
        ranks, grace_s = render_ranks(self.ranks.live), self._options.shutdown_timeout_s
        is_first, self._has_forwarded = not self._has_forwarded, True
        try:
            if is_first:
                self._screen.note(
                    f"sending {death_sig.name} to {ranks}; they have {grace_s:g} s (send it again to kill them now)"
                )
                self.ranks.end(death_sig, grace_s)
                return
        except SignalException:
            ranks = render_ranks(self.ranks.live)
        self._screen.note(f"killing {ranks}")
        self.ranks.kill()


def _describe_broken(broken: OSError) -> DdpilotError:
    did = "showing the output of the ranks"
    if isinstance(broken, BrokenPipeError):
        found = f"the reader of the output of `ddpilot run` on {platform.node()} has exited"
        return OutputClosedError(did, found=found, exitcode=128 + signal.SIGPIPE)
    return LaunchError(did, found=str(broken), fix="Check whether the disk that the output is written to is full")


_PATIENCE_S = 0.3
"""Seconds within which a rank that raised usually exits; the full report is then available and no notice is needed."""

_MAX_CHARS = 500


class EarlyNotice:
    """Shows at most one notice per attempt, by `note`. A rank that has imported torch takes 1 s or more to exit."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._is_shown = False

    def is_due(self, waited_s: float) -> bool:
        """True if the notice should be shown: the failure has been known for `waited_s` and the rank has not exited."""
        return not self._is_shown and waited_s > _PATIENCE_S

    def show(self, error: DdpilotError) -> None:
        """Show the notice about `error`, unless one was shown before."""
        if not self._is_shown:
            self._is_shown = True
            self._note(f"{summarize(error)}; the report follows once the ranks have exited")


def summarize(error: DdpilotError) -> str:
    """The failure, its line and the codes of the findings in one line."""
    findings: Sequence[Any] = getattr(error, "findings", ())
    cause = next((each for each in findings if error.found.startswith(each.summary)), None)
    if cause is not None:
        return _shorten(f"{cause.summary} ({cause.code}); {cause.why}".removesuffix("; "))
    parts = [_shorten(error.found.partition("\n")[0])]
    if isinstance(error, RankError) and (raised := find_raised_line(error.rank_traceback)) is not None:
        parts.append(f"at {raised}")
    parts += [_describe(each) for each in findings if each.code not in error.found]
    return ", ".join(parts)


def _describe(finding: Any) -> str:
    where = "" if finding.place is None else f", {finding.place.file}:{finding.place.line}"
    return _shorten(f"{finding.code} {finding.name}: {finding.summary}") + where


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."


class PipedLogs(DefaultLogsSpecs):
    """Directs ranks' output to the pipes of `screen`, and to torch's files if `options` ask for them.

    `folder`: for the ranks' reports if there is no `--log-dir`; `variables`: added to each rank's environment, as are
    those of `observer`. torch calls `reify` just before it starts ranks, so this is where an attempt begins and
    `make_observer` is called. `rendezvous`: opens the mailbox for the observers of the other nodes; None if a backend
    of torch is used.
    """

    def __init__(
        self,
        options: RunOptions,
        screen: OutputThread,
        folder: Path,
        variables: Mapping[str, str],
        make_observer: MakeObserver | None,
        rendezvous: StaticRendezvousHandler | None,
    ) -> None:
        redirects, tee = Std.from_str(options.redirects), Std.from_str(options.tee)
        if options.log_dir is not None and redirects == tee == Std.NONE:
            tee = Std.ALL
        self._writes_files = not redirects == tee == Std.NONE
        root = options.log_dir or tempfile.gettempdir() if self._writes_files else folder
        super().__init__(str(root), redirects, tee)
        self._options = options
        self._screen = screen
        self._variables = variables
        self._make_observer = make_observer
        self._static = rendezvous
        self.observer = LaunchObserver()
        """Observer of the current attempt."""

    def _make_log_dir(self, log_dir: str | None, _run_id: str) -> str:
        made: str = super()._make_log_dir(log_dir, self._options.rdzv_id.replace("/", "_"))
        if self._writes_files:
            self._screen.note(f"writing output to {made}")
        return made

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create pipes, files and variables for one attempt; torch calls this before it starts the ranks."""
        found = super().reify(envs)
        ranks = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
        self.end_observer(is_clean=False)
        if self._make_observer is not None:
            mailbox = None if self._static is None else self._static.open_mailbox()
            world_size = int(envs[0]["WORLD_SIZE"])
            made = self._make_observer(self._options.name, world_size, tuple(sorted(ranks.values())), mailbox)
            self.observer = made or LaunchObserver()
        added = {HOOKS_VARIABLE: ",".join(self.observer.hooks)} if self.observer.hooks else {}
        for env in envs.values():
            env.update({**self._variables, **self.observer.variables, **added})
        copies: dict[Pipe, Path | None] = {}
        streams = {"stdout": (found.stdouts, found.tee_stdouts), "stderr": (found.stderrs, found.tee_stderrs)}
        for stream, (paths, copied) in streams.items():
            for local_rank, rank in ranks.items():
                if not paths[local_rank] or local_rank in copied:  # else it goes to a file only
                    copies[rank, stream] = Path(copied[local_rank]) if local_rank in copied else None
        wanted = self._options.shown_local_ranks
        shown = None if wanted is None else {rank for local_rank, rank in ranks.items() if local_rank in wanted}
        sources = self._screen.begin_attempt(list(ranks.values()), copies, shown)
        for stream, (paths, _) in streams.items():
            paths.update({each: sources[rank, stream] for each, rank in ranks.items() if (rank, stream) in sources})
        return LogsDest(stdouts=found.stdouts, stderrs=found.stderrs, error_files=found.error_files)

    def end_observer(self, *, is_clean: bool) -> None:
        """End the observation of the current attempt, if there is one."""
        observer, self.observer = self.observer, LaunchObserver()
        observer.take(self._screen.note)
        observer.end(is_clean)
