# SPDX-License-Identifier: Apache-2.0
"""What import-linter cannot see: imports of the root package, and which modules are free of torch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src"

# These run in a rank, in the server that forks ranks, or in the agent of a running job. Everything else is free of
# torch: it also runs in a shell or on a login node, where `import torch` would cost seconds and hundreds of megabytes.
MAY_IMPORT_TORCH = (
    *("ddpilot.group", "ddpilot.launching.rank_server.rank"),
    *("ddpilot.launching.elastic.agent", "ddpilot.launching.elastic.setup"),
    *("ddpilot.launching.elastic.rendezvous.static_rendezvous", "ddpilot.launching.elastic.rendezvous.heartbeat"),
    *("ddpilot.session.rank", "ddpilot.integrations.fastai", "ddpilot.integrations.lightning"),
    *("ddpilot.checkpoint", "ddpilot.data", "ddpilot.training", "ddpilot.trainer", "ddpilot.callbacks"),
    *("ddpilot.guard.probes", "ddpilot.record.prefork", "ddpilot.record.accelerator", "ddpilot.gpu_check.checks"),
    *("ddpilot.diagnose.ranks", "ddpilot.diagnose.nodes"),
    *("ddpilot.diagnose.updates.probe", "ddpilot.diagnose.updates.changes", "ddpilot.diagnose.updates.placements"),
    "ddpilot.diagnose.updates.draws",
    *("ddpilot.profiler.rank.probe", "ddpilot.profiler.rank.modules"),
    *("ddpilot.profiler.rank.buckets", "ddpilot.profiler.rank.host_reads"),
    *("ddpilot.profiler.rank.resources", "ddpilot.profiler.rank.node_clocks"),
    *("ddpilot.profiler.rank.tracing", "ddpilot.profiler.rank.device_clock", "ddpilot.profiler.running"),
)
# These compare what ranks have recorded; numpy takes a tenth of a second.
MAY_IMPORT_NUMPY = (
    *("ddpilot.diagnose.updates", "ddpilot.diagnose.verify", "ddpilot.diagnose.ladder", "ddpilot.profiler"),
    *("ddpilot.cli.profile_command", "ddpilot.cli.tune_command"),
)
YET_FREE_OF_TORCH = (
    *("ddpilot.group", "ddpilot.group.address", "ddpilot.group.decorators"),
    "ddpilot.group.measurements",
    *("ddpilot.guard.probes", "ddpilot.gpu_check.checks"),
    "ddpilot.session.rank",
    *("ddpilot.integrations.fastai", "ddpilot.integrations.fastai.app"),
    *("ddpilot.integrations.lightning", "ddpilot.integrations.lightning.app"),
)
MAY_IMPORT_IPYTHON = ("ddpilot.magics", "ddpilot.output.notebook_view")

PROBE = """
import importlib, json, os, signal, sys, threading
environment, handlers = dict(os.environ), {n: signal.getsignal(n) for n in signal.valid_signals()}
guilty = {}
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    for unwanted in sys.argv[2:]:
        if unwanted in sys.modules and unwanted not in guilty:
            guilty[unwanted] = name
print(json.dumps({
    "guilty": guilty,
    "threads": threading.active_count(),
    "environment": dict(os.environ) == environment,
    "signals": {n: signal.getsignal(n) for n in signal.valid_signals()} == handlers,
}))
"""


def module_names() -> list[str]:
    """Every module under src, dotted."""
    relative = (path.relative_to(SOURCES).with_suffix("") for path in SOURCES.rglob("*.py"))
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in relative)


def is_free_of_torch(name: str) -> bool:
    """Whether the module named `name` has to be importable without torch."""
    return name in YET_FREE_OF_TORCH or not name.startswith(MAY_IMPORT_TORCH)


def root_imports(tree: ast.AST) -> Iterator[int]:
    """Lines of `import ddpilot`, `from ddpilot import x` and relative imports, which reach the root the same way."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(alias.name == "ddpilot" for alias in node.names):
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and (node.module == "ddpilot" or node.level):
            yield node.lineno


def test_sources_never_import_the_root_package() -> None:
    """A lower floor that asks the root for a name would reach a higher floor behind import-linter's back."""
    guilty = [
        f"{path.relative_to(SOURCES)}:{line}"
        for path in SOURCES.rglob("*.py")
        for line in root_imports(ast.parse(path.read_text()))
    ]
    assert not guilty, f"import the submodule instead (from ddpilot.errors import ...) in {guilty}"


@pytest.mark.parametrize("line", ["import ddpilot", "from ddpilot import Session", "from . import errors"])
def test_root_imports_are_found_when_they_hide_in_a_function(line: str) -> None:
    """The check above sees each way to write it, also inside a function."""
    assert list(root_imports(ast.parse(f"def f():\n    {line}\n"))) == [2]


@pytest.mark.parametrize("kind", ["the rest", "magics", "with numpy"])
def test_torch_free_modules_stay_free_of_torch_and_of_side_effects(kind: str) -> None:
    """Importing them all in a fresh interpreter loads no torch, numpy or IPython and changes nothing else."""
    kinds = {"magics": MAY_IMPORT_IPYTHON, "with numpy": MAY_IMPORT_NUMPY}
    others = tuple(name for other, prefixes in kinds.items() if other != kind for name in prefixes)
    free = [name for name in module_names() if is_free_of_torch(name) and not name.startswith(others)]
    names = [name for name in free if kind == "the rest" or name.startswith(kinds[kind])]
    example = {"magics": "magics.magic", "with numpy": "diagnose.verify.verify", "the rest": "launcher"}[kind]
    assert f"ddpilot.{example}" in names
    unwanted = ["torch", *(["numpy"] if kind != "with numpy" else []), *(["IPython"] if kind != "magics" else [])]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(names), *unwanted],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"guilty": {}, "threads": 1, "environment": True, "signals": True}
