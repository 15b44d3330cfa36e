# SPDX-License-Identifier: Apache-2.0
"""The public names: declared once, resolvable, documented, and the reference page says what the docstrings say."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ddpilot
from ddpilot._project import PROJECT_URL
from tests.each import for_each

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The script that renders the pages of docs/reference, as a module."""
    spec = importlib.util.spec_from_file_location("render_reference", ROOT / "docs" / "render_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_reference() -> str:
    """The text of all pages of docs/reference."""
    return "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))


@for_each(ddpilot.__all__)
def test_public_name_resolves_and_is_documented(name: str) -> None:
    """It comes from a module of ddpilot, has a docstring of its own, and stands in the reference."""
    value = getattr(ddpilot, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__module__.startswith("ddpilot."), f"{name} comes from {value.__module__}"
        assert (value.__doc__ or "").strip(), f"{name} has no docstring"
    if name == "__version__":
        return  # a string: tested below
    assert f"# {name}\n" in read_reference(), f"{name} is missing in docs/reference"


@pytest.mark.parametrize("name", ["callbacks", "watch"])
def test_public_module_resolves_and_its_names_are_in_the_reference(name: str) -> None:
    """It is an attribute of `ddpilot` and can be imported; each of its names has a docstring and a section."""
    module = getattr(ddpilot, name)
    assert module is importlib.import_module(f"ddpilot.{name}")
    text = read_reference()
    for public in module.__all__:
        assert (getattr(module, public).__doc__ or "").strip(), f"{name}.{public} has no docstring"
        assert f"# {name}.{public}\n" in text or f"# {public}\n" in text


def test_public_modules_are_not_imported_with_the_package() -> None:
    """Their callbacks import torch: only the first use of `ddpilot.callbacks` does."""
    code = "import sys, ddpilot; print([name for name in sys.modules if name.startswith('ddpilot.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_members_are_documented(reference: ModuleType) -> None:
    """Every public method and property of every public class has a docstring, and every dataclass field its line."""
    bare = []
    for name in ddpilot.__all__:
        value = getattr(ddpilot, name)
        if inspect.isclass(value):
            bare += [f"{name}.{member}" for member, what in reference.public_members(value) if not inspect.getdoc(what)]
            known = reference.field_docs(value)
            fields = getattr(value, "__dataclass_fields__", {})
            about = value.__doc__ or ""
            bare += [f"{name}.{field}" for field in fields if field not in known and f"`{field}`" not in about]
    assert not bare, f"without a docstring: {bare}"


def test_public_names_are_declared_alike_for_run_time_and_type_checkers() -> None:
    """`__all__`, the table of homes and the imports under TYPE_CHECKING hold the same names, in order."""
    tree = ast.parse(Path(ddpilot.__file__).read_text())
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module for node in guard.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == ddpilot._HOMES
    assert list(ddpilot.__all__) == sorted(ddpilot.__all__)
    assert set(ddpilot.__all__) - {"__version__"} == set(imported)


def test_version_is_that_of_the_installed_package() -> None:
    """Read when it is asked for: importing ddpilot does not import `importlib.metadata`."""
    code = (
        "import sys; before = 'importlib.metadata' in sys.modules; import ddpilot\n"
        "assert before or 'importlib.metadata' not in sys.modules; print(ddpilot.__version__)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == importlib.metadata.version("ddpilot") == ddpilot.__version__


def test_version_and_description_agree_with_pyproject() -> None:
    """The version is in pyproject.toml; CITATION.cff, the command and the installed package have the same one."""
    project = (ROOT / "pyproject.toml").read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    (version,) = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)
    (description,) = re.findall(r'^description = "(.+)"$', project, re.MULTILINE)
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [version] == [ddpilot.__version__]
    assert description in " ".join(citation.split())
    printed = subprocess.run([sys.executable, "-m", "ddpilot", "--version"], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == f"ddpilot {version}"


def test_address_of_the_repository_is_in_one_place() -> None:
    """While it is empty, no page has one; once it is set, CITATION.cff has to have it."""
    links = re.findall(r"^repository-code: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert links == ([PROJECT_URL] if PROJECT_URL else [])
    assert not PROJECT_URL.endswith("/")


def test_rule_for_public_names_lists_the_public_modules() -> None:
    """CONTRIBUTING.md names each module whose `__all__` is public, and the rule for changes."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Public API\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(ddpilot(?:\.\w+)*)`", section.partition(";")[0]))
    assert named == {"ddpilot", *(f"ddpilot.{name}" for name in ddpilot._MODULES)}
    assert "Before 1.0" in section
    assert "From 1.0 on" in section


def test_public_names_are_not_shadowed_by_subpackages() -> None:
    """No subpackage is called like a public name: importing it would replace the name by a module."""
    packages = {path.name for path in (ROOT / "src" / "ddpilot").iterdir() if path.is_dir()}
    assert not packages & set(ddpilot.__all__)


def test_unknown_name_says_which_names_there_are() -> None:
    """A misspelt name is an AttributeError that lists the public ones; `dir()` lists them too."""
    with pytest.raises(AttributeError, match=r"no attribute 'lunch'; its public names are .*RankError"):
        _ = ddpilot.lunch
    assert set(ddpilot.__all__) <= set(dir(ddpilot))


def test_every_public_name_has_its_task_in_the_reference(reference: ModuleType) -> None:
    """Exceptions stand in a section of their own."""
    by_task = [name for task in reference.TASKS for name in task.names if "." not in name]
    errors = [name for name in ddpilot.__all__ if name[0] != "_" and reference.is_error(getattr(ddpilot, name))]
    assert sorted([*by_task, *errors, "__version__"]) == sorted(ddpilot.__all__)


def test_reference_keeps_paragraphs_and_lists_of_a_method(reference: ModuleType) -> None:
    """Each in one line, indented as the body of a definition."""
    doc = "Do it.\n\nArguments:\n\n- `x`: one\n  two.\n- `y`: three.\n\nReturns\nit."
    body = "Do it.\n\n  Arguments:\n\n  - `x`: one two.\n  - `y`: three.\n\n  Returns it."
    assert reference._indent(doc) == body


def test_reference_pages_are_what_the_docstrings_say(reference: ModuleType) -> None:
    """docs/reference has the rendered docstrings, to the letter, and no other page."""
    rendered = reference.render_reference()
    assert set(rendered) == set(reference.TARGET.glob("*.md"))
    for path, text in rendered.items():
        assert path.read_text() == text, f"run `make reference` and commit {path.relative_to(ROOT)}"
