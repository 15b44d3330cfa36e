# SPDX-License-Identifier: Apache-2.0
"""The program that is verified, a script or a function, and one recorded run of it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpilot.diagnose.updates.record import SPEC_VARIABLE, RankRecord, RecordSpec
from ddpilot.errors import DdpilotError, LaunchError, did_you_mean
from ddpilot.findings.finding import Finding
from ddpilot.launcher import Launcher
from ddpilot.launching.elastic.options import TargetKind
from ddpilot.launching.elastic.rank_main import ScriptCall
from ddpilot.launching.elastic.target import check_target
from ddpilot.module_names import UPDATE_HOOK
from ddpilot.repeated_runs import RepeatedLauncher


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
        launcher = RepeatedLauncher(
            nproc_per_node=nproc_per_node,
            hooks=(UPDATE_HOOK,),
            run_limit_s=self._timeout_s,
            on_finding=functools.partial(_keep, findings),
            stall_warn_s=15.0,
            env={SPEC_VARIABLE: str(folder)},
        )
        error: DdpilotError | None = None
        values: tuple[Any, ...] = ()
        output: tuple[str, ...] = ()
        try:
            if self._program.fn is not None:
                values = self._run_function(launcher)
            else:
                output = self._run_script(launcher, folder)
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

    def _run_function(self, launcher: Launcher) -> tuple[Any, ...]:
        program = self._program
        assert program.fn is not None
        return tuple(launcher.run(program.fn, *program.args, **program.kwargs))

    def _run_script(self, launcher: Launcher, folder: Path) -> tuple[str, ...]:
        program, output = self._program, folder / "output.txt"
        launcher.run(ScriptCall(program.name, program.kind, program.script, program.args, stdout=str(output)))
        return tuple(output.read_text("utf-8", "replace").splitlines())


def _keep(findings: list[Finding], finding: Finding) -> str | None:
    """Add a finding; returns "stop" if it says that the ranks never proceed."""
    findings.append(finding)
    return "stop" if finding.severity == "error" and finding.code.startswith(("DDP1", "DDP2")) else None


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a function; of a call with arguments that were bound to it, too."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__qualname__", repr(fn)))


def find_program(fn: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Program:
    """Return the program of a function, or the one that a text names: a script, or ``script.py:function``.

    `args`: words for the script's command line; a function that is named takes none. Raises LaunchError if it cannot be
    found.
    """
    if not isinstance(fn, str):
        return Program(name=name_of(fn), fn=fn, args=args, kwargs=kwargs)
    words, args = fn, tuple(map(str, args))
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
