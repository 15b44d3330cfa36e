# SPDX-License-Identifier: Apache-2.0
"""No modules and no packages import each other in a circle, imports within functions and for types included."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"

Graph = Mapping[str, set[str]]


def read_modules() -> dict[str, ast.Module]:
    """Every module under src, parsed, by its dotted name; a package has the name of its folder."""
    found = {}
    for path in sorted(SOURCES.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports_of(module: ast.Module, known: Iterable[str]) -> Iterator[str]:
    """The modules of ours that `module` imports, wherever in its source that stands."""
    names = set(known)
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module in names:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in submodules if name in names)
            if any(name not in names for name in submodules):
                yield node.module


@functools.cache
def module_graph() -> dict[str, set[str]]:
    """Which modules each module imports; the root package, which has public names alone, is left out."""
    modules = read_modules()
    graph = {name: set(imports_of(module, modules)) - {name, "ddpilot"} for name, module in modules.items()}
    del graph["ddpilot"]
    return graph


def sibling_graphs(graph: Graph) -> Iterator[tuple[str, dict[str, set[str]]]]:
    """For each package, which of the modules and packages side by side in it import which others of them."""
    parents = {name.rpartition(".")[0] for name in graph}
    for parent in sorted(parents):
        siblings: dict[str, set[str]] = {}
        for name, imported in graph.items():
            child = _child_of(parent, name)
            if child is not None:
                others = {_child_of(parent, other) for other in imported} - {None, child}
                siblings.setdefault(child, set()).update(other for other in others if other is not None)
        yield parent, siblings


def _child_of(parent: str, name: str) -> str | None:
    if not name.startswith(f"{parent}."):
        return None
    return f"{parent}.{name.removeprefix(f'{parent}.').partition('.')[0]}"


def find_circle(graph: Graph) -> list[str]:
    """The modules of one circle, in the order in which they import each other; empty if there is none."""
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            circle = visit(other, [*way, name])
            if circle:
                return circle
        done.add(name)
        return []

    for name in graph:
        circle = visit(name, [])
        if circle:
            return circle
    return []


def test_find_circle_follows_imports() -> None:
    """The search itself finds a circle that it is given, and none where imports go one way."""
    assert find_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Of single modules, in any package."""
    assert find_circle(module_graph()) == []


def test_no_packages_import_each_other_in_a_circle() -> None:
    """Of what stands side by side in one package: modules, and packages as a whole."""
    circles = {parent: find_circle(siblings) for parent, siblings in sibling_graphs(module_graph())}
    assert {parent: circle for parent, circle in circles.items() if circle} == {}


def test_no_package_has_more_than_twelve_modules() -> None:
    """Packages in it are not counted, nor callbacks, which are one public class a module."""
    counts: dict[str, int] = {}
    for path in SOURCES.rglob("*.py"):
        if path.name != "__init__.py":
            folder = ".".join(path.parent.relative_to(SOURCES).parts)
            counts[folder] = counts.get(folder, 0) + 1
    assert {folder: num for folder, num in counts.items() if num > 12 and folder != "ddpilot.trainer.callbacks"} == {}
