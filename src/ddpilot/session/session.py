# SPDX-License-Identifier: Apache-2.0
"""`Session`: persistent ranks that keep their variables between cells."""

from __future__ import annotations

import contextlib
import os
import queue
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpilot.environments.private_files import scratch_folder
from ddpilot.errors import LaunchError, LaunchInterrupted, RankError, RecordError
from ddpilot.findings.text import render_ranks
from ddpilot.launching.launch import check_function
from ddpilot.launching.options import check_keywords, explain_unknown
from ddpilot.launching.shipping.pickling import RankResults, open_parcel
from ddpilot.launching.shipping.unpicklable import ship
from ddpilot.launching.system_limits import limits_explained
from ddpilot.output.view import TextView, View
from ddpilot.session import arguments
from ddpilot.session.arguments import check_ranks
from ddpilot.session.execution.outcome import Outcome
from ddpilot.session.kernels.event_router import InterruptListener
from ddpilot.session.kernels.states import describe_absent, make_dead_error
from ddpilot.session.options import SessionOptions
from ddpilot.session.protocol.messages import Call, Pull, Push, call_with_sources
from ddpilot.session.protocol.variables import check_complete, describe_pushed, make_refusal_error
from ddpilot.session.status import RankStatus, describe_stack, read_statuses
from ddpilot.user_files import collect_sources
from ddpilot.watch.options import OnFinding

if TYPE_CHECKING:
    from ddpilot.profiler.result import Profile
    from ddpilot.session.kernels.manager import RankKernels


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """A cell that ran on `ranks` in `duration_s` seconds. Its output was shown in the view.

    `profile`: where the time of the cell's updates went, if `execute` was called with `profile=True` and the cell made
    at least 6 updates. It displays itself in a notebook and as text, and has `plot()`, `to_html(path)` and `summary`.
    `no_profile`: the reason if a profile was requested and there is none.
    """

    ranks: tuple[int, ...]
    duration_s: float
    profile: Profile | None = None
    no_profile: str = ""


@explain_unknown
class Session:
    """Persistent ranks on this machine, or with `hosts` or `slurm` on others. Each rank is a Jupyter kernel.

    Use it as a context manager to `stop` it at the end. Options are the fields of `SessionOptions`. `view` displays the
    output; None: lines labelled with the rank, on stdout and stderr.

    Every rank's namespace contains `rank`, `world_size`, `device` and `group`, and its environment variables are those
    of a torchrun job. The process group is entered at the first collective (or `DDP(model)`), unless the code calls
    `init_process_group()` itself. When a cell fails on one rank, the other ranks are freed from their collectives, the
    group is rebuilt and all variables are kept.

    Raises LaunchError if ranks cannot be started. Raises LaunchInterrupted, a KeyboardInterrupt, if the start is
    interrupted; no process remains then.
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
        hosts: Iterable[str] | None = None,
        slurm: bool = False,
        nodes: int | None = None,
        gpus_per_node: int | None = None,
        slurm_options: Mapping[str, str] | None = None,
        view: View | None = None,
    ) -> None:
        arguments.refuse_in_a_rank()
        place = {"hosts": arguments.read_hosts(hosts), "slurm": slurm, "nodes": nodes, "gpus_per_node": gpus_per_node}
        start = {"backend": backend, "seed": seed, "apps": _listed(apps), "env": env or {}, "preload": _listed(preload)}
        output_options = {"verbose": verbose, "output": output, "output_limit_bytes": output_limit_bytes}
        diagnosis = {"watch": watch, "guard": guard, "on_finding": on_finding, "stall_warn_s": stall_warn_s}
        options: dict[str, Any] = {**place, **start, **output_options, **diagnosis}
        self.options = SessionOptions(
            nproc_per_node=nproc_per_node,
            gpus=gpus if isinstance(gpus, int) else tuple(gpus),  # type: ignore[arg-type]  # SessionOptions rejects ints
            slurm_options=slurm_options or {},
            respawn=respawn,
            keep_cache=keep_cache,
            **options,
        )
        arguments.check_installed()
        from ddpilot.session.execution.runner import Runner  # needs the packages that `check_installed` looks for

        if view is None:
            view = TextView(self.options.output, self.options.output_limit_bytes)
        with limits_explained("starting a session"):
            self._kernels = _start_kernels(self.options, view)
        self._runner = Runner(self._kernels)
        self._num_cells = 0
        self._finalizer = weakref.finalize(self, self._kernels.close)

    @property
    def world_size(self) -> int:
        """Number of ranks, including dead ones."""
        return self._kernels.world_size

    @property
    def is_running(self) -> bool:
        """True until the session is stopped."""
        return not self._kernels.is_closed

    @property
    def can_restart(self) -> bool:
        """True if dead ranks can be restarted; False once the process from which they are forked has died."""
        return self._kernels.processes.can_start

    def status(self) -> tuple[RankStatus, ...]:
        """Return the status of every rank: idle, busy or dead, its cell, its current collective and its resource usage.

        May be called while a different thread runs a cell. Takes a tenth of a second.
        """
        return read_statuses(self._kernels)

    def pids(self) -> dict[int, int]:
        """Return the process ids of all live ranks, by rank. Ranks on other machines are not included."""
        found = ((rank, self._kernels.processes.pid(rank)) for rank in self._kernels.states.live)
        return {rank: pid for rank, pid in found if pid is not None} if self.is_running else {}

    def execute(
        self,
        code: str,
        *,
        ranks: Iterable[int] | None = None,
        quiet: bool = False,
        cell: int | None = None,
        keep_cache: bool | None = None,
        profile: bool = False,
    ) -> CellResult:
        """Run a cell on `ranks` (None: all live ranks), as if it were typed into a notebook on each; magics work.

        - `quiet`: do not show the output.
        - `cell`: number of the cell in errors ("Cell In[7]"); None: the next number.
        - `keep_cache`: as for the session.
        - `profile`: measure where the time of the cell's updates goes.

        Raises RankError with the first failure in time, or WatchError if a finding of the watch stops the cell. All
        ranks have then returned, and the group was rebuilt. For a finding of the guard at the end of the cell, the cell
        has completed on all ranks and the group is unchanged. Raises LaunchInterrupted, a KeyboardInterrupt, if it is
        interrupted.
        """
        arguments.check_code(code)
        chosen = select_ranks(self._kernels, ranks, "running a cell")
        if ranks is None and len(chosen) < self.world_size:
            self._kernels.note(describe_absent(self._kernels.states.dead, chosen))
        self._num_cells = cell if cell is not None else self._num_cells + 1
        began_s = time.monotonic()
        keeps = self.options.keep_cache if keep_cache is None else keep_cache
        with scratch_folder("ddpilot-profile-") if profile else contextlib.nullcontext() as folder:
            on_ranks = f"{folder}-ranks" if folder and self.options.is_remote else str(folder or "")
            outcome = self._runner.cell(
                code, chosen, number=self._num_cells, quiet=quiet, keep_cache=keeps, profile_folder=on_ranks
            )
            if folder and self.options.is_remote:
                with contextlib.suppress(LaunchError):  # no rank is alive: the cell's failure is raised
                    self._take_profile(on_ranks, folder)
            outcome.raise_failure(f"Cell In[{self._num_cells}]")
            duration_s = time.monotonic() - began_s
            found, why_none = (None, "") if folder is None else _read_profile(folder)
        return CellResult(ranks=chosen, duration_s=duration_s, profile=found, no_profile=why_none)

    def _take_profile(self, on_ranks: str, folder: Path) -> None:
        """Move what the live ranks of other machines have recorded, in their folder `on_ranks`, into `folder`."""
        alive = select_ranks(self._kernels, None, "collecting a profile")
        parts = {"fn": _take_files, "args": (on_ranks,), "kwargs": {}}
        parcel, known = ship(
            "ddpilot-call", parts, (_take_files, (on_ranks,), {}), did="collecting a profile", known=None
        )
        _, answers = self._runner.call(Call(), alive, parcel, "collecting a profile")
        for files in RankResults([answers[rank] for rank in alive if rank in answers], known):
            for name, data in files.items():
                (folder / name).write_bytes(data)

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RankResults:
        """Run `fn(*args, **kwargs)` on every rank and return the results by rank.

        The function and its arguments are sent by value, as with `launch`: the function uses the globals of this
        process, not the variables of the ranks. Raises ShipError before anything runs if they cannot be pickled, and
        RankError, WatchError and LaunchInterrupted as `execute` does.
        """
        name = check_function(fn)
        check_keywords(name, fn, kwargs, lambda keyword: "")
        chosen = select_ranks(self._kernels, None, f"running `{name}`", all_live=True)
        parts = {"fn": fn, "args": args, "kwargs": kwargs}
        call = (call_with_sources, (collect_sources(), fn, *args), kwargs)
        with interrupt_message(f"`{name}` was interrupted before any rank ran it"):
            parcel, known = ship("ddpilot-call", parts, call, did=f"running `{name}`", known=None)
        outcome, answers = self._runner.call(Call(), chosen, parcel, name)
        error = outcome.error
        if isinstance(error, RankError) and error.rank is not None and error.rank in answers:
            error.__cause__ = self._open_error(answers[error.rank], known, error.rank)
        outcome.raise_failure(f"`{name}`")
        return RankResults([answers[rank] for rank in chosen], known)

    def push(self, values: Mapping[str, Any], *, ranks: Iterable[int] | None = None) -> None:
        """Set variables on `ranks` (None: all live ranks). Each rank gets its own copy, also of tensors.

        Functions and methods in `values` use the variables of the rank as globals. A global that the rank does not have
        is sent along; a global that it has is kept.

        Raises LaunchError for an optimizer or a scheduler without the objects that it updates. Raises ShipError, which
        names the object that cannot be pickled. No variable is set then.
        """
        arguments.check_values(values)
        check_complete(values)
        chosen = select_ranks(self._kernels, ranks, "pushing")
        did = f"pushing {', '.join(values)}"
        with interrupt_message(f"{did} was interrupted: no variable was set on any rank"):
            parcel, _ = ship("ddpilot-push", values, dict(values), did=did, known=None)
        outcome, _ = self._runner.call(Push(), chosen, parcel, "push")
        if outcome.was_interrupted:
            raise LaunchInterrupted(describe_push(values, outcome))
        outcome.raise_failure("push")
        for text in describe_pushed(values, outcome.values):
            self._kernels.note(text)

    def pull(self, expression: str | Sequence[str], *, rank: int | None = None) -> Any:
        """Return the value of a variable or expression on `rank`; with None, a list with the values of all ranks.

        For several expressions each value is a list. Values that share objects on the rank also share them here: an
        optimizer that is pulled together with its model updates that model. Tensors are copied to the CPU and sent as
        memory files.

        Raises LaunchError if a rank has no such variable, for a DDP model, and for an optimizer or a scheduler without
        the objects that it updates. Raises ShipError if the value cannot be pickled, and RankError if the expression
        raises.
        """
        is_one = isinstance(expression, str) or not isinstance(expression, Sequence)
        expressions = [arguments.check_expression(each) for each in ([expression] if is_one else expression)]
        did = f"pulling {', '.join(f'`{each}`' for each in expressions)}"
        chosen = select_ranks(self._kernels, None if rank is None else [rank], did, all_live=True)
        name = f"pull {' '.join(expressions)}"
        outcome, answers = self._runner.call(Pull(expressions=expressions), chosen, None, name)
        outcome.raise_failure("pull")
        if outcome.values:
            raise make_refusal_error(did, outcome.values)
        values = [each[0] if is_one else each for each in RankResults([answers[each] for each in chosen], [])]
        return values if rank is None else values[0]

    def restart(self, rank: int | Iterable[int] | None = None) -> None:
        """Restart `rank`, several ranks, or with None all ranks, under the same rank numbers.

        The restarted ranks lose their variables, and the other ranks keep theirs. A process group that was in use is
        rebuilt with all ranks. Raises LaunchError before any rank is ended if a rank does not exist or no rank can be
        started. Raises LaunchInterrupted if it is interrupted; the ranks to restart are dead then.
        """
        ranks = range(self.world_size) if rank is None else [rank] if isinstance(rank, int) else rank
        self._runner.restart(check_ranks(ranks, self.world_size, "restarting"))

    def interrupt(self) -> bool:
        """Interrupt the cell that a different thread is running, as the interrupt button does.

        Returns False if no cell is running.
        """
        return self._kernels.interrupt()

    def stacks(self, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Return the Python stack of each rank, innermost frame first, also if a rank is stuck in C++ or holds the GIL.

        The stack has the user's frames of the main thread; it is "idle" if no cell is running. Takes up to a second.
        """
        chosen = select_ranks(self._kernels, ranks, "reading stacks")
        stacks = self._kernels.read_stacks(chosen)
        return {rank: describe_stack(stacks.get(rank, ())) for rank in chosen}

    def complete(
        self, code: str, cursor: int, *, rank: int = 0, limit_s: float = 0.3
    ) -> tuple[tuple[str, ...], int, int]:
        """Return completions of `code` on `rank`, and the start and end of the characters that they replace.

        `cursor`: position in `code`, in characters. Returns no matches if the rank is busy, dead or takes more than
        `limit_s` seconds.
        """
        reply = self._ask_kernel("complete", {"code": code, "cursor_pos": cursor}, rank, limit_s)
        if reply is None:
            return (), cursor, cursor
        return tuple(reply["matches"]), reply["cursor_start"], reply["cursor_end"]

    def inspect(
        self, code: str, cursor: int, *, detail_level: int = 0, rank: int = 0, limit_s: float = 0.3
    ) -> dict[str, str]:
        """Return the documentation of the object at `cursor` in `code` on `rank`, by MIME type, as Shift-Tab shows it.

        `cursor`: position in `code`, in characters. `detail_level`: 1 adds the source code. Empty if there is no such
        object, or if the rank is busy, dead or takes more than `limit_s` seconds.
        """
        asked = {"code": code, "cursor_pos": cursor, "detail_level": detail_level}
        reply = self._ask_kernel("inspect", asked, rank, limit_s)
        return dict(reply["data"]) if reply is not None and reply.get("found") else {}

    def _ask_kernel(self, kind: str, content: dict[str, Any], rank: int, limit_s: float) -> dict[str, Any] | None:
        if rank in self._kernels.states.dead or not self.is_running:
            return None
        return self._runner.ask_kernel(kind, content, rank, limit_s)

    def stop(self) -> None:
        """End the ranks: run the apps' finalizers and exit handlers, and kill ranks that take more than two seconds.

        A second call does nothing. Raises LaunchInterrupted if it is interrupted; all ranks have ended then, too.
        """
        if self.is_running:
            with interrupt_message(
                "the stop was interrupted: the ranks were killed before their exit handlers finished"
            ):
                try:
                    self._kernels.end_turn()
                    self._runner.finish()
                finally:
                    with InterruptListener(queue.SimpleQueue()):
                        self._finalizer()

    def _open_error(self, parcel: memoryview, known: list[Any], rank: int) -> BaseException | None:
        try:
            error, _ = open_parcel(parcel, known)
        except Exception as failure:  # noqa: BLE001  # the exception's own code runs; its text is in the report
            self._kernels.note(f"the exception of rank {rank} could not be rebuilt here: {failure!r}")
            return None
        return error if isinstance(error, BaseException) else None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"{len(self._kernels.states.live)} of {self.world_size} ranks live" if self.is_running else "stopped"
        return f"Session({state})"


def _listed(names: Iterable[str]) -> Any:
    """Return `names` as a tuple, and a string as it is, which `SessionOptions` rejects."""
    return names if isinstance(names, str) else tuple(names)


def _start_kernels(options: SessionOptions, view: View) -> RankKernels:
    from ddpilot.session.kernels.manager import RankKernels

    try:
        kernels = RankKernels(options, view)
        view.bind(kernels.send_comm)
        kernels.start()
    except KeyboardInterrupt:
        raise LaunchInterrupted("starting the ranks was interrupted: no rank is running") from None
    return kernels


def _take_files(folder: str) -> dict[str, bytes]:
    """In a rank: the files of its profile, which are removed."""
    from ddpilot.profiler.spans_file import take_files  # imports numpy

    return take_files(folder, int(os.environ["RANK"]))


def _read_profile(folder: Path) -> tuple[Profile | None, str]:
    """Return the profile that the ranks of a cell have recorded; or None, and why."""
    from ddpilot.profiler.result import read_profile  # imports numpy

    try:
        return read_profile(folder), ""
    except RecordError as error:
        return None, f"{error.found}. {error.fix}"


def select_ranks(
    kernels: RankKernels, asked: Iterable[int] | None, did: str, *, all_live: bool = False
) -> tuple[int, ...]:
    """Return the ranks that `did` runs on: `asked`, or all live ranks if `asked` is None.

    With `all_live`, None requires that every rank is alive. If the session respawns ranks, dead ranks count as live.
    Raises LaunchError if a required rank is dead, if no rank is live, or if the session was stopped.
    """
    if kernels.is_closed:
        raise LaunchError(did, found="the session was stopped", fix="Start a new one")
    dead, respawns = kernels.states.dead, kernels.options.respawn
    chosen = tuple(range(kernels.world_size)) if asked is None else check_ranks(asked, kernels.world_size, did)
    missing = [rank for rank in chosen if rank in dead]
    if respawns or not missing:
        return chosen
    if asked is None and not all_live and len(missing) < kernels.world_size:
        return tuple(rank for rank in chosen if rank not in dead)
    raise make_dead_error(did, missing, dead, can_restart=kernels.processes.can_start)


@contextlib.contextmanager
def interrupt_message(text: str) -> Iterator[None]:
    """Turn a KeyboardInterrupt in the body into LaunchInterrupted with `text`; a LaunchInterrupted is passed on."""
    try:
        yield
    except LaunchInterrupted:
        raise
    except KeyboardInterrupt:
        raise LaunchInterrupted(text) from None


def describe_push(names: Iterable[str], outcome: Outcome) -> str:
    """Describe on which ranks variables are set after an interrupted push. Each rank has set all of them or none."""
    parts = outcome.parts.values()
    done = sorted(part.rank for part in parts if part.has_succeeded)
    dead = sorted(part.rank for part in parts if part.ended is not None)
    left = sorted({part.rank for part in parts} - {*done, *dead})
    states = [
        f"{state} {render_ranks(ranks)}"
        for state, ranks in (("set on", done), ("not set on", left), ("killed:", dead))
        if ranks
    ]
    return f"pushing {', '.join(names)} was interrupted: {', '.join(states)}"
