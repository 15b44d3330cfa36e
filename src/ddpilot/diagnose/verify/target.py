# SPDX-License-Identifier: Apache-2.0
"""The program that is verified, a script or a function, and one recorded run of it."""

from __future__ import annotations

import ast
import functools
import io
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpilot.diagnose.updates.record import SPEC_VARIABLE, RankRecord, RecordSpec
from ddpilot.errors import DdpilotError, LaunchError, WatchError, did_you_mean
from ddpilot.findings.finding import Finding
from ddpilot.launcher import Launcher
from ddpilot.launching.elastic.options import RunOptions, TargetKind
from ddpilot.launching.elastic.prepare import prepare_run
from ddpilot.launching.elastic.run import run_prepared
from ddpilot.launching.elastic.target import check_target
from ddpilot.launching.observer import LaunchObserver
from ddpilot.module_names import UPDATE_HOOK
from ddpilot.output.writer import LabelledWriter
from ddpilot.watch.companion import Watcher
from ddpilot.watch.options import WatchOptions


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is run: `fn` with its arguments, or else a script or module with words of its command line."""

    name: str
    fn: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    script: str = ""
    kind: TargetKind = "script"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One recorded run of a program."""

    nproc_per_node: int
    spec: RecordSpec
    ranks: tuple[RankRecord, ...]
    values: tuple[Any, ...] = ()
    """What the function returned on each rank; empty for a script, or if it was ended after the wanted updates."""
    findings: tuple[Finding, ...] = ()
    """Findings of watch and guard."""
    error: DdpilotError | None = None
    """The error that ended the run."""
    output: tuple[str, ...] = ()
    """Lines that rank 0 of a script has written."""

    @property
    def num_updates(self) -> int:
        """Steps that all ranks have recorded."""
        return min((len(record.updates) for record in self.ranks), default=0)


class Runner:
    """Runs `program` again and again, each time recorded in a folder below `folder`."""

    def __init__(self, program: Program, folder: Path, *, timeout_s: float) -> None:
        self._program = program
        self._folder = folder
        self._timeout_s = timeout_s
        self.num_runs = 0

    def run(self, nproc_per_node: int, spec: RecordSpec) -> Run:
        """Run the program on so many ranks. An error that ends it is in the result; raises LaunchInterrupted only."""
        self.num_runs += 1
        folder = self._folder / f"run{self.num_runs}"
        folder.mkdir()
        spec.write(folder)
        findings: list[Finding] = []
        watching = WatchOptions(on_finding=functools.partial(_keep, findings), stall_warn_s=15.0)
        error: DdpilotError | None = None
        values: tuple[Any, ...] = ()
        output: tuple[str, ...] = ()
        try:
            if self._program.fn is not None:
                values = self._run_function(nproc_per_node, watching, folder)
            else:
                output = self._run_script(nproc_per_node, watching, folder)
        except DdpilotError as raised:
            error = raised
            findings += getattr(raised, "findings", ())
        return Run(
            nproc_per_node=nproc_per_node,
            spec=spec,
            ranks=tuple(RankRecord(folder, rank) for rank in range(nproc_per_node)),
            values=values,
            findings=tuple({(each.code, each.place, each.summary): each for each in findings}.values()),
            error=error,
            output=output,
        )

    def _run_function(self, nproc: int, watching: WatchOptions, folder: Path) -> tuple[Any, ...]:
        program = self._program
        launcher = _RecordingLauncher(
            nproc_per_node=nproc,
            output="silent",
            timeout_s=self._timeout_s,
            on_finding=watching.on_finding,
            stall_warn_s=watching.stall_warn_s,
            env={SPEC_VARIABLE: str(folder)},
        )
        return tuple(launcher.run(program.fn, *program.args, **program.kwargs))  # type: ignore[arg-type]

    def _run_script(self, nproc: int, watching: WatchOptions, folder: Path) -> tuple[str, ...]:
        program = self._program
        options = RunOptions(
            target=program.script,
            kind=program.kind,
            args=program.args,
            nproc_per_node=nproc,
        )
        prepared = prepare_run(options, os.environ)
        display = _KeptOutput()
        variables = {**prepared.variables, SPEC_VARIABLE: str(folder)}
        watch = functools.partial(_RecordingWatcher, watching, timeout_s=self._timeout_s)
        run_prepared(replace(prepared, display=display, variables=variables), watch)
        return tuple(display.text.getvalue().splitlines())


def _keep(findings: list[Finding], finding: Finding) -> str | None:
    """Add a finding; returns "stop" if it says that the ranks never proceed."""
    findings.append(finding)
    return "stop" if finding.severity == "error" and finding.code.startswith(("DDP1", "DDP2")) else None


class _RecordingLauncher(Launcher):
    def _make_observer(self, name: str, count: int) -> LaunchObserver:
        return _RecordingWatcher(self, name, count)


class _RecordingWatcher(Watcher):
    """The watch of a run, which also calls the hook that records updates, and prints nothing.

    `timeout_s`: seconds after which the run is ended; None: the launcher does so.
    """

    def __init__(self, options: WatchOptions, name: str, *args: Any, timeout_s: float | None = None) -> None:
        super().__init__(options, name, *args)
        self.hooks = (*self.hooks, UPDATE_HOOK)
        self._timer = threading.Timer(timeout_s, self._end_run, (name, timeout_s)) if timeout_s is not None else None

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Begin to observe the ranks, and to count their time."""
        super().begin(*args, **kwargs)
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def _end_run(self, name: str, timeout_s: float) -> None:
        self._error = self._error or WatchError(
            f"running `{name}`",
            found=f"its ranks had not ended after {timeout_s:g} s",
            fix="Raise `timeout_s` if they were only slow",
            findings=self._find_all() if self._observer is not None else (),
        )
        self._wake()

    def end(self, is_clean: bool) -> None:
        """Close the watch."""
        if self._timer is not None:
            self._timer.cancel()
        super().end(is_clean)

    def take(self, note: Callable[[str], None]) -> WatchError | None:  # noqa: ARG002
        """Return the error with which the run is to end, if any."""
        return super().take(lambda _: None)


class _KeptOutput(LabelledWriter):
    """Keeps what rank 0 writes to stdout, and shows nothing."""

    def __init__(self) -> None:
        super().__init__("rank_zero", None)
        self.text = io.StringIO()
        self._streams = {"stdout": self.text, "stderr": io.StringIO()}


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a function; of a call with arguments that were bound to it, too."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__qualname__", repr(fn)))


def find_program(words: str, args: tuple[str, ...]) -> Program:
    """Return the program that `words` names: a script, or ``script.py:function``, which is imported in the ranks.

    `args`: words for the script's command line; a function takes none. Raises LaunchError if it cannot be found.
    """
    path, colon, name = words.rpartition(":")
    if not colon or not name.isidentifier():
        check_target("script", words)
        return Program(name=Path(words).name, script=words, args=args)
    if args:
        raise LaunchError(
            f"running `{words}`",
            found=f"{len(args)} words for a command line, which a function does not have",
            fix="Give the script alone, or a function that needs no arguments",
        )
    check_target("script", path)
    _check_name(Path(path), name, f"running `{words}`")
    return Program(name=words, fn=_call_function, args=(str(Path(path).resolve()), name))


def _check_name(path: Path, name: str, did: str) -> None:
    """Raise LaunchError if the file has no function `name` at its top level, or one that needs arguments."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {each.asname or each.name: node for each in node.names}
        elif isinstance(node, ast.Assign):
            found |= {each.id: node for each in node.targets if isinstance(each, ast.Name)}
    defined = found.get(name)
    if defined is None:
        fix = did_you_mean(name, found) or "Name a function at the top level of the file"
        raise LaunchError(did, found=f"{path} has no function `{name}`", fix=fix)
    if isinstance(defined, ast.Assign) and isinstance(defined.value, ast.Constant):
        raise LaunchError(did, found=f"`{name}` of {path} is {defined.value.value!r}", fix="Name a function")
    needed = _needed_by(defined) if isinstance(defined, ast.FunctionDef) else []
    if needed:
        fix = f"Name a function without arguments, or pass them in Python: `ddpilot.verify({name}, ...)`"
        raise LaunchError(did, found=f"`{name}` of {path} needs {', '.join(needed)}", fix=fix)


def _needed_by(function: ast.FunctionDef) -> list[str]:
    """Return the arguments without a default."""
    arguments = function.args
    by_position = [*arguments.posonlyargs, *arguments.args]
    needed = by_position[: len(by_position) - len(arguments.defaults)]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [each.arg for each in (*needed, *(each for each, default in pairs if default is None))]


def _call_function(path: str, name: str) -> Any:
    """Import the file `path` under its name, so that its ``if __name__ == "__main__":`` does not run; in a rank."""
    import importlib
    import sys

    sys.path.insert(0, str(Path(path).parent))
    return getattr(importlib.import_module(Path(path).stem), name)()
