# SPDX-License-Identifier: Apache-2.0
"""The program that is verified, a script or a function, and one recorded run of it."""

from __future__ import annotations

import ast
import functools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpilot.diagnose.updates.record import SPEC_VARIABLE, RankRecord, RecordSpec
from ddpilot.errors import DdpilotError, LaunchError, WatchError, did_you_mean
from ddpilot.findings.finding import Finding
from ddpilot.launcher import Launcher
from ddpilot.launching.elastic.options import TargetKind
from ddpilot.launching.elastic.rank_main import run_as_main
from ddpilot.launching.elastic.target import check_target
from ddpilot.launching.observer import LaunchObserver
from ddpilot.module_names import UPDATE_HOOK
from ddpilot.watch.companion import Watcher
from ddpilot.watch.options import WatchOptions

_PRELOAD = ("torch._dynamo",)
"""Imported before ranks are forked: each rank of each run would otherwise import it (1 s), as DDP and optimizers do."""


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
        assert program.fn is not None
        return tuple(self._launcher(nproc, watching, folder).run(program.fn, *program.args, **program.kwargs))

    def _run_script(self, nproc: int, watching: WatchOptions, folder: Path) -> tuple[str, ...]:
        output = folder / "output.txt"
        self._launcher(nproc, watching, folder).run(_ScriptCall(self._program, str(output)))
        return tuple(output.read_text("utf-8", "replace").splitlines())

    def _launcher(self, nproc: int, watching: WatchOptions, folder: Path) -> Launcher:
        return _RecordingLauncher(
            nproc_per_node=nproc,
            output="silent",
            run_limit_s=self._timeout_s,
            preload=_PRELOAD,
            on_finding=watching.on_finding,
            stall_warn_s=watching.stall_warn_s,
            env={SPEC_VARIABLE: str(folder)},
        )


def _keep(findings: list[Finding], finding: Finding) -> str | None:
    """Add a finding; returns "stop" if it says that the ranks never proceed."""
    findings.append(finding)
    return "stop" if finding.severity == "error" and finding.code.startswith(("DDP1", "DDP2")) else None


@dataclass(frozen=True, kw_only=True)
class _RecordingLauncher(Launcher):
    run_limit_s: float
    """Seconds after which the watch ends a run, with the findings about its ranks."""

    def _make_observer(self, name: str, count: int) -> LaunchObserver:
        return _RecordingWatcher(self, name, count, limit_s=self.run_limit_s)


class _RecordingWatcher(Watcher):
    """The watch of a run, which also calls the hook that records updates, and prints nothing."""

    def __init__(self, options: WatchOptions, name: str, *args: Any, limit_s: float) -> None:
        super().__init__(options, name, *args)
        self.hooks = (*self.hooks, UPDATE_HOOK)
        self._timer = threading.Timer(limit_s, self._end_run, (name, limit_s))
        self._timer.daemon = True

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Begin to observe the ranks, and to count their time."""
        super().begin(*args, **kwargs)
        self._timer.start()

    def _end_run(self, name: str, limit_s: float) -> None:
        self._error = self._error or WatchError(
            f"running `{name}`",
            found=f"its ranks had not ended after {limit_s:g} s",
            fix="Raise `timeout_s` if they were only slow",
            findings=self._find_all() if self._observer is not None else (),
        )
        self._wake()

    def end(self, is_clean: bool) -> None:
        """Close the watch."""
        self._timer.cancel()
        super().end(is_clean)

    def take(self, note: Callable[[str], None]) -> WatchError | None:  # noqa: ARG002
        """Return the error with which the run is to end, if any."""
        return super().take(lambda _: None)


class _ScriptCall:
    """Runs a script as the ``__main__`` of a rank, as in a fresh interpreter except that torch is imported."""

    def __init__(self, program: Program, output: str) -> None:
        self.__qualname__ = program.name
        self._program = (program.kind, program.script, program.args)
        self._output = output

    def __call__(self) -> None:
        """Run the script. What rank 0 writes to stdout goes to a file."""
        import sys

        import torch

        if os.environ["RANK"] == "0":
            output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(output, 1)
            os.close(output)
        # Ranks of a launch seed all devices at random; a fresh interpreter has a fixed seed on accelerators.
        own_seed = torch.initial_seed()
        torch.manual_seed(torch.Generator().initial_seed())
        torch.default_generator.manual_seed(own_seed)
        sys.path.insert(0, "")
        kind, script, args = self._program
        run_as_main(kind, script, list(args))


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
