# SPDX-License-Identifier: Apache-2.0
"""`Session`: ranks that stay, with their variables, from one cell to the next."""

from __future__ import annotations

import queue
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ddpilot.errors import LaunchInterrupted, RankError
from ddpilot.launching.keywords import check_keywords, explain_unknown
from ddpilot.launching.limits import limits_explained
from ddpilot.launching.local import wire
from ddpilot.launching.local.host import check_function
from ddpilot.launching.results import RankResults
from ddpilot.launching.shipping.blame import ship
from ddpilot.launching.shipping.pickling import map_parcel, open_parcel
from ddpilot.launching.shipping.sources import collect_sources
from ddpilot.session import arguments
from ddpilot.session.choosing import choose, choose_one
from ddpilot.session.deaths import describe_absent
from ddpilot.session.local import check_installed
from ddpilot.session.options import SessionOptions
from ddpilot.session.pushed import check_complete, describe_pushed
from ddpilot.session.refusals import make_refusal_error
from ddpilot.session.sourced import call_with_sources
from ddpilot.session.stacks import trim_stack
from ddpilot.session.status import RankStatus
from ddpilot.session.stopped import describe_push, saying
from ddpilot.session.stops import Stops
from ddpilot.session.view import View
from ddpilot.watch.options import OnFinding

if TYPE_CHECKING:
    from ddpilot.session.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """A cell that ran on `ranks` in `duration_s` seconds. What it showed went to the view."""

    ranks: tuple[int, ...]
    duration_s: float


@explain_unknown
class Session:
    """Ranks of this machine that stay: each is a Jupyter kernel, started when the session is made.

    In every rank's namespace are `rank`, `world_size`, `device` and `group`; the process group is entered at the first
    collective (or `DDP(model)`), unless the code makes its own with `init_process_group()`. Code on a rank sees a
    torchrun job. When a cell fails on one rank, all of them are freed, the group is rebuilt and every variable stays.

    A context manager: `stop` at the end. Options are those of `SessionOptions`. `view`: where output goes; None:
    labelled lines on stdout and stderr. Raises LaunchError where ranks cannot be started, and LaunchInterrupted, a
    KeyboardInterrupt, after the stop button; nothing is left then.
    """

    def __init__(
        self,
        nproc_per_node: int | str = "auto",
        *,
        gpus: Iterable[int] = (),
        backend: str | None = None,
        seed: int | None = None,
        apps: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
        preload: Iterable[str] = (),
        respawn: bool = False,
        keep_cache: bool = False,
        verbose: bool = False,
        output: Any = "labelled",
        output_limit_bytes: int | None = None,
        watch: bool = True,
        guard: bool = True,
        on_finding: OnFinding = "report",
        stall_warn_s: float = 30.0,
        view: View | None = None,
    ) -> None:
        arguments.refuse_in_a_rank()
        self.options = SessionOptions(
            nproc_per_node=nproc_per_node,
            gpus=gpus if isinstance(gpus, int) else tuple(gpus),  # type: ignore[arg-type]  # so does it of these
            backend=backend,
            seed=seed,
            apps=apps if isinstance(apps, str) else tuple(apps),  # type: ignore[arg-type]  # it says how to write it
            env=env or {},
            preload=preload if isinstance(preload, str) else tuple(preload),  # type: ignore[arg-type]
            respawn=respawn,
            keep_cache=keep_cache,
            verbose=verbose,
            output=output,
            output_limit_bytes=output_limit_bytes,
            watch=watch,
            guard=guard,
            on_finding=on_finding,
            stall_warn_s=stall_warn_s,
        )
        check_installed()
        from ddpilot.session.work import Work  # needs the packages that `check_installed` looks for

        self._view = _default_view(self.options) if view is None else view
        with limits_explained("starting a session"):
            self._ranks = _start_ranks(self.options, self._view)
        self._work = Work(self._ranks)
        self._num_cells = 0
        self._finalizer = weakref.finalize(self, self._ranks.close)

    @property
    def world_size(self) -> int:
        """Number of ranks, dead ones included."""
        return self._ranks.world_size

    @property
    def is_running(self) -> bool:
        """Whether the session was not stopped."""
        return not self._ranks.is_closed

    @property
    def can_restart(self) -> bool:
        """Whether dead ranks can be started anew; not so once the process from which they are forked has died."""
        return self._ranks.host.can_start

    def status(self) -> tuple[RankStatus, ...]:
        """What every rank does now: idle, in which cell, in which collective since when, dead and why; what it uses.

        Also while a cell runs, from another thread. Takes a tenth of a second.
        """
        from ddpilot.session.statuses import read_statuses

        return read_statuses(self._ranks)

    def pids(self) -> dict[int, int]:
        """The process id of every rank that lives, by rank."""
        found = ((rank, self._ranks.host.pid(rank)) for rank in self._ranks.standing.live)
        return {rank: pid for rank, pid in found if pid is not None} if self.is_running else {}

    def execute(
        self,
        code: str,
        *,
        ranks: Iterable[int] | None = None,
        quiet: bool = False,
        cell: int | None = None,
        keep_cache: bool | None = None,
    ) -> CellResult:
        """Run a cell on `ranks` (None: all that live), as if typed into each one's notebook; magics work.

        `quiet`: show nothing that it prints. `cell`: its number in errors ("Cell In[7]"); default: counted.
        `keep_cache` as for the session. Raises RankError with the first failure in time, or WatchError where what the
        watch found is to stop the cell, after all ranks have come back and the group was rebuilt; where guard finds it
        as the cell ends, the cell has run on all ranks and the group is as it was. Raises LaunchInterrupted, a
        KeyboardInterrupt, after the stop button.
        """
        arguments.check_code(code)
        chosen = choose(self._ranks, ranks, "running a cell")
        if ranks is None and len(chosen) < self.world_size:
            self._ranks.note(describe_absent(self._ranks.standing.dead, chosen))
        self._num_cells = cell if cell is not None else self._num_cells + 1
        began_s = time.monotonic()
        keeps = self.options.keep_cache if keep_cache is None else keep_cache
        outcome = self._work.cell(code, chosen, number=self._num_cells, quiet=quiet, keep_cache=keeps)
        outcome.raise_failure(f"Cell In[{self._num_cells}]")
        return CellResult(ranks=chosen, duration_s=time.monotonic() - began_s)

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RankResults:
        """Run `fn(*args, **kwargs)` on every rank and return every rank's value, by rank.

        Function and arguments travel by value, as with `launch`: it sees the globals that it has here, not the ranks'
        variables. Raises ShipError before anything runs; RankError and LaunchInterrupted as `execute` does.
        """
        name = check_function(fn)
        check_keywords(name, fn, kwargs, lambda keyword: "")
        chosen = choose(self._ranks, None, f"running `{name}`", all_live=True)
        parts = {"fn": fn, "args": args, "kwargs": kwargs}
        call = (call_with_sources, (collect_sources(), fn, *args), kwargs)
        with saying(f"`{name}` was stopped before any rank ran it"):
            parcel, known = ship("ddpilot-call", parts, call, did=f"running `{name}`", known=None)
        outcome, answers = self._with_parcel("call", {}, chosen, parcel, name)
        try:
            error = outcome.error
            if isinstance(error, RankError) and error.rank is not None and answers.get(error.rank):
                error.__cause__ = self._open_error(answers[error.rank], known, error.rank)
            outcome.raise_failure(f"`{name}`")
            return RankResults([answers[rank] for rank in chosen], known)
        finally:
            _close(answers)

    def push(self, values: Mapping[str, Any], *, ranks: Iterable[int] | None = None) -> None:
        """Set variables of `ranks` (None: all that live). Each rank gets a copy of its own, tensors too.

        Functions and methods among `values` have the rank's variables for globals: what they refer to is set as well
        where the rank lacks it, and kept where the rank has it. Raises LaunchError for an optimizer or a scheduler
        without what it updates, ShipError, which names what cannot be pickled; then nothing was set.
        """
        arguments.check_values(values)
        check_complete(values)
        chosen = choose(self._ranks, ranks, "pushing")
        did = f"pushing {', '.join(values)}"
        with saying(f"{did} was stopped: nothing was set on any rank"):
            parcel, _ = ship("ddpilot-push", values, dict(values), did=did, known=None)
        outcome, _ = self._with_parcel("push", {}, chosen, parcel, "push")
        if outcome.was_stopped:
            raise LaunchInterrupted(describe_push(values, outcome))
        outcome.raise_failure("push")
        for text in describe_pushed(values, outcome.values):
            self._ranks.note(text)

    def pull(self, expression: str | Sequence[str], *, rank: int | None = None) -> Any:
        """The value of a variable (or any expression) of `rank`, or with None a list of every rank's, by rank.

        Several expressions give a list of values in place of each value. These share what they share on the rank: an
        optimizer that is pulled with its model updates that model. Tensors come as copies on the CPU, through a memory
        file. Raises LaunchError where a rank has no such variable, where it is a DDP model, or an optimizer or a
        scheduler without what it updates; ShipError where it cannot be pickled, RankError where the expression raises.
        """
        is_one = isinstance(expression, str) or not isinstance(expression, Sequence)
        expressions = [arguments.check_expression(each) for each in ([expression] if is_one else expression)]
        did = f"pulling {', '.join(f'`{each}`' for each in expressions)}"
        chosen = choose_one(self._ranks, rank, did)
        name = f"pull {' '.join(expressions)}"
        outcome, answers = self._with_parcel("pull", {"expressions": expressions}, chosen, [], name)
        try:
            outcome.raise_failure("pull")
            if outcome.values:
                raise make_refusal_error(did, outcome.values)
            values = [each[0] if is_one else each for each in RankResults([answers[each] for each in chosen], [])]
        finally:
            _close(answers)
        return values if rank is None else values[0]

    def restart(self, rank: int | Iterable[int] | None = None) -> None:
        """Restart `rank` (or several, or with None all) under the same number. Variables of restarted ranks are lost.

        The others keep theirs; where a process group was in use it is rebuilt with all ranks. Raises LaunchError before
        any rank ends if one is not there or none can be started, and LaunchInterrupted after the stop button: then the
        ranks that were to be restarted are dead.
        """
        did, fix = "restarting", "Give the number of one rank, several, or nothing for all"
        if rank is None:
            ranks = tuple(range(self.world_size))
        elif isinstance(rank, int):
            ranks = (arguments.check_rank(rank, self.world_size, did, fix),)
        else:
            ranks = arguments.check_ranks(rank, self.world_size, did)
        self._work.restart(ranks)

    def interrupt(self) -> bool:
        """Stop the cell that another thread has running, as the stop button does; False where none runs."""
        return self._ranks.interrupt()

    def stacks(self, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Where the Python of each rank is now, innermost line first, also while it is stuck in C++ or holds the GIL.

        The user's part of the main thread's stack, by rank; "idle" where no cell runs. Takes up to a second.
        """
        chosen = choose(self._ranks, ranks, "reading stacks")
        return {rank: trim_stack(text) for rank, text in self._ranks.read_stacks(chosen).items()}

    def complete(
        self, code: str, cursor: int, *, rank: int = 0, limit_s: float = 0.3
    ) -> tuple[tuple[str, ...], int, int]:
        """What `rank` would put in place of the characters of `code` from the second value to the third.

        `cursor`: where the person is, in characters. No matches where the rank is busy, dead or slow.
        """
        reply = self._ask_kernel("complete", {"code": code, "cursor_pos": cursor}, rank, limit_s)
        if reply is None:
            return (), cursor, cursor
        return tuple(reply["matches"]), reply["cursor_start"], reply["cursor_end"]

    def inspect(
        self, code: str, cursor: int, *, detail_level: int = 0, rank: int = 0, limit_s: float = 0.3
    ) -> dict[str, str]:
        """What `rank` shows of the object at `cursor` of `code`, as Shift-Tab in a notebook does: text by MIME type.

        `cursor`: where the person is, in characters. `detail_level`: 1 for the source code too. Empty if there is no
        such object, or if the rank is busy, dead or slow.
        """
        asked = {"code": code, "cursor_pos": cursor, "detail_level": detail_level}
        reply = self._ask_kernel("inspect", asked, rank, limit_s)
        return dict(reply["data"]) if reply is not None and reply.get("found") else {}

    def _ask_kernel(self, kind: str, content: dict[str, Any], rank: int, limit_s: float) -> dict[str, Any] | None:
        if rank in self._ranks.standing.dead or not self.is_running:
            return None
        return self._work.ask_kernel(kind, content, rank, limit_s)

    def stop(self) -> None:
        """End the ranks: apps clean up, exit handlers run, and what is left after two seconds is killed.

        A second call does nothing. LaunchInterrupted after the stop button: the ranks are gone all the same.
        """
        if self.is_running:
            with saying(
                "the stop was cut short: the ranks were killed before they were through with their exit handlers"
            ):
                try:
                    self._ranks.end_turn()
                    self._work.finish()
                finally:
                    with Stops(queue.SimpleQueue()):
                        self._finalizer()

    def _open_error(self, fds: list[int], known: list[Any], rank: int) -> BaseException | None:
        try:
            error, _ = open_parcel(map_parcel(fds), known)
        except Exception as failure:  # noqa: BLE001  # the exception's own code runs; its text is in the report
            self._ranks.note(f"the exception of rank {rank} could not be rebuilt here: {failure!r}")
            return None
        return error if isinstance(error, BaseException) else None

    def _with_parcel(
        self, verb: str, arguments: dict[str, Any], ranks: Sequence[int], parcel: list[int], name: str
    ) -> Any:
        try:
            return self._work.call(verb, arguments, ranks, parcel, name)
        finally:
            _close({0: parcel})

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"{len(self._ranks.standing.live)} of {self.world_size} ranks live" if self.is_running else "stopped"
        return f"Session({state})"


def _default_view(options: SessionOptions) -> View:
    from ddpilot.session.shown.terminal import TextView

    return TextView(options.output, options.output_limit_bytes)


def _start_ranks(options: SessionOptions, view: View) -> Ranks:
    from ddpilot.session.ranks import Ranks

    try:
        ranks = Ranks(options, view)
        view.bind(ranks.send_comm)
        ranks.start()
    except KeyboardInterrupt:
        raise LaunchInterrupted("starting the ranks was stopped: none of them runs") from None
    return ranks


def _close(parcels: Mapping[int, list[int]]) -> None:
    for fds in parcels.values():
        wire.close_all(fds)
