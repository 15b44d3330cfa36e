# SPDX-License-Identifier: Apache-2.0
"""What the documents say is so: links lead somewhere, snippets run, and print what the page says they print."""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack, suppress
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ddpilot
from tests.each import for_each
from tests.notebook.stored import LATE_RANKS
from tests.soak import IS_SOAK, often, soak

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if path.parent.name != "reference")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Every python block of a page is a cell of an IPython shell: what the reader has before them when they try it. All
# pages have one process: to import torch, there and in its rank server, takes 4 s. A page finds nothing of another.
SHELL = """
import json, os, sys
from IPython.core.interactiveshell import InteractiveShell
import sklearn  # sets variables, without which the pages after the first would have another rank server
shell = InteractiveShell.instance(colors="nocolor")
environ, folder = dict(os.environ), os.getcwd()
for cells in json.loads(sys.stdin.read()):
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(67280421310721)  # as torch begins
    for cell in cells:
        shell.run_cell(cell, store_history=True)
        print("=== end of cell ===", flush=True)
    if "ddpilot" in shell.extension_manager.loaded:
        shell.run_line_magic("ddp", "stop")
        shell.extension_manager.unload_extension("ddpilot")
    shell.reset()
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    print("=== end of page ===", flush=True)
"""
SHELL_LIMIT_S = 300


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub makes of the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def relative_links(page: Path) -> list[str]:
    """Targets of all links of the page that stay inside the repository."""
    text = FENCE.sub("", page.read_text())
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    return [link for link in links if not link.startswith(("http:", "https:", "mailto:"))]


def cells_and_outputs(page: Path) -> list[tuple[str, str]]:
    """Each python block with the text block right after it; a block without one is a cell that prints nothing."""
    fences = [*FENCE.finditer(page.read_text())]
    found = []
    for fence, following in zip_longest(fences, fences[1:]):
        if fence[1] == "python":
            is_output = following and following[1] == "text" and following.start() - fence.end() == 1
            found.append((fence[2], following[2] if following and is_output else ""))
    return found


def by_rank(line: str) -> list[str]:
    """What each rank printed: on a busy machine ranks are too far apart to share a line."""
    shared = re.match(r"\[ranks ([\d,]+)\] (.*)", line)
    return [f"[rank {rank}] {shared[2]}" for rank in shared[1].split(",")] if shared else [line]


def normalise(text: str) -> list[str]:
    """Lines without what differs between machines; sorted where ranks print, since their order is free."""
    text = text.replace(f" on {platform.node()}", " on myhost")
    text = re.sub(r'File "\S*/site-packages/', 'File ".../', text)
    text = re.sub(r"\b\d+\.\d s\b", "0.0 s", text)
    text = re.sub(r"ddpilot watch \S+`", "ddpilot watch JOB`", text)
    text = LATE_RANKS.sub("", text)
    text = re.sub(r"ddpilot: importing `.*\n", "", text)  # which packages start threads depends on the machine
    lines = [line.rstrip() for whole in text.splitlines() if whole.strip() for line in by_rank(whole)]
    return sorted(lines) if any(line.startswith("[rank") for line in lines) else lines


@for_each(PAGES, lambda page: page.relative_to(ROOT))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """Every relative link names a file of the repository, and its anchor a heading of that file."""
    broken = []
    for link in relative_links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


# A ```py block whose first line is `# name.py` is a file; a ```console block has commands after `$`, each with what it
# prints. `...` stands for any lines, or for any part of a line.
FILE = re.compile(r"# (?P<name>[\w-]+\.py)\n")
COMMAND = re.compile(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


def sections_with_commands(page: Path) -> dict[str, tuple[dict[str, str], list[tuple[str, str]]]]:
    """By heading, the files of a section, and its commands with their outputs; only of pages whose commands run."""
    found = {}
    is_run = (
        re.search(rf"^```py\n{FILE.pattern}", page.read_text(), re.MULTILINE) is not None
    )  # docs/sites: tests/slurm
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
        fences = [*FENCE.finditer(section)]
        files = {head["name"]: fence[2] for fence in fences if fence[1] == "py" and (head := FILE.match(fence[2]))}
        commands = [each for fence in fences if fence[1] == "console" for each in COMMAND.findall(fence[2])]
        if commands and is_run:
            found[section.partition("\n")[0]] = (files, commands)
    return found


def is_like(actual: str, expected: str) -> bool:
    """True if `actual` is `expected`, in which `...` stands for any text, and on a line of its own for any lines."""
    pieces = [re.escape(piece) for piece in re.split(r"^\.\.\.\n", expected, flags=re.MULTILINE)]
    pattern = r"(?:.*\n)*?".join(piece.replace(re.escape("..."), ".*") for piece in pieces)
    return re.fullmatch(pattern, actual) is not None


# <!-- needs: accelerate --> on the second line of a page: a library that is not installed with `.[dev]` everywhere.
NEEDS = re.compile(r"^<!-- needs: (\w+) -->$", re.MULTILINE)
SHIMS = ROOT / "tests" / "notebook" / "shims"


def prepare_library(page: Path) -> dict[str, str]:
    """Variables for the library that a page is about, if it is about one. Skip the test if it is not installed."""
    needed = NEEDS.search(page.read_text())
    if needed is None:
        return {}
    if find_spec(needed[1]) is None:
        pytest.skip(f"{needed[1]} is not installed: `pip install '.[dev,bench]'` installs it")
    return {"PYTHONPATH": str(SHIMS), "OMP_NUM_THREADS": "1"}


COMMANDS = [
    pytest.param(page, files, commands, id=f"{page.stem}: {heading}")
    for page in PAGES
    for heading, (files, commands) in sections_with_commands(page).items()
]

OFTEN = (
    "faq: Works on one node and not on two",
    "faq: Address already in use",
    "faq: Expected all tensors to be on the same device",
    "faq: Out of memory on GPU 0 only",
    "lint: Find mistakes before a job runs",
    "README: Find out why a torchrun job hangs",
)
"""The quick ones, and one that watch explains; the soak runs the others as well."""
MIGRATE = ROOT / "docs" / "migrate"


@pytest.mark.timeout(180)
@often(*OFTEN)
@pytest.mark.parametrize(("page", "files", "commands"), COMMANDS)
def test_commands_print_what_the_page_says(
    page: Path, files: dict[str, str], commands: list[tuple[str, str]], tmp_path: Path
) -> None:
    """A section's commands run in a folder with its files, and each prints the text under it."""
    library = prepare_library(page)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "COLUMNS": "120", "PATH": path, **library}
    with ExitStack() as stack:
        for command, expected in commands:
            options: dict[str, Any] = {"cwd": tmp_path, "env": environ, "text": True, "stdout": subprocess.PIPE}
            if command.endswith(" &"):
                process = stack.enter_context(subprocess.Popen(shlex.split(command[:-2]), **options))
                stack.callback(process.terminate)
                assert process.stdout is not None
                printed = process.stdout.readline()
            else:
                done = subprocess.run(
                    command, shell=True, stderr=subprocess.STDOUT, timeout=150, check=False, **options
                )
                printed = done.stdout
            plain = re.sub(r"\n+", "\n", printed.replace(f"{tmp_path}{os.sep}", ""))
            assert is_like(plain, re.sub(r"\n+", "\n", expected)), f"`{command}` printed\n{printed}"


ANY_FENCE = re.compile(r"(?:^<!-- (?P<mark>[^\n]+) -->\n)?^```(?P<kind>\w*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)
EXCUSE = re.compile(r"not run: (?P<reason>\w.{5,})|run by: (?P<test>[\w/.]+)")


def names_page(test: Path, page: Path) -> bool:
    """True if a test is there and names the page, or reads all pages of its folder."""
    text = test.read_text() if test.exists() else ""
    return page.name in text or f'"{page.parent.name}"' in text or test == Path(__file__)


def fences_by_fate(page: Path) -> dict[str, list[str]]:
    """Blocks of the page, named by line and text: "run" (here or by another test), "excused", and "neither"."""
    text = page.read_text()
    has_files = re.search(rf"^```py\n{FILE.pattern}", text, re.MULTILINE) is not None
    is_site = page.parent.name == "sites"  # tests/slurm/test_sites.py
    found: dict[str, list[str]] = {"run": [], "excused": [], "neither": []}
    end_of_run = -1
    for fence in ANY_FENCE.finditer(text):
        name = f"{page.relative_to(ROOT)}:{text[: fence.start()].count(chr(10)) + 1} {fence['text'][:40]!r}"
        excuse = EXCUSE.fullmatch(fence["mark"] or "")
        is_output = fence["kind"] == "text" and fence.start() - end_of_run == 1
        is_run = (
            fence["kind"] == "python" or is_output or (fence["kind"] in ("py", "console") and (has_files or is_site))
        )
        if is_run or (excuse and excuse["test"] and names_page(ROOT / excuse["test"], page)):
            found["run"].append(name)
            end_of_run = fence.end()
        else:
            found["excused" if excuse and excuse["reason"] else "neither"].append(name)
    return found


def test_every_block_runs_or_says_why_not() -> None:
    """Right above a block that is not run here stands `<!-- not run: reason -->` or `<!-- run by: tests/... -->`."""
    fates = [fences_by_fate(page) for page in PAGES if page == ROOT / "README.md" or page.is_relative_to(ROOT / "docs")]
    assert [name for fate in fates for name in fate["neither"]] == []
    num_run, num_excused = (sum(len(fate[kind]) for fate in fates) for kind in ("run", "excused"))
    assert num_run > 2 * num_excused, f"{num_run} blocks run, {num_excused} do not"


OFTEN_PAGES = (
    *("README.md", "docs/faq.md", "docs/tutorials/function.md", "docs/how_to/jupyter.md", "docs/how_to/hang.md"),
)
"""Those read first; the commands and methods of the others have tests of their own, and the soak runs their cells."""
PAGES_WITH_CELLS = [page for page in PAGES if cells_and_outputs(page) and not NEEDS.search(page.read_text())]
PAGES_OF_LIBRARIES = [page for page in PAGES if cells_and_outputs(page) and NEEDS.search(page.read_text())]


@pytest.fixture(scope="module")
def printed_by_page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """What the cells of each page that this run tests printed, up to the one that took too long."""
    folder = tmp_path_factory.mktemp("shell")
    items = [each for each in request.session.items if IS_SOAK or each.get_closest_marker("soak") is None]
    tests = [each for each in items if each.name.startswith("test_snippets_print_what_the_page_says[")]
    pages: list[Path] = [each.callspec.params["page"] for each in tests]  # type: ignore[attr-defined]
    (folder / "pages.json").write_text(json.dumps([[cell for cell, _ in cells_and_outputs(page)] for page in pages]))
    with (folder / "pages.json").open() as given, (folder / "printed").open("w") as printed:
        options: dict[str, Any] = {"stdin": given, "stdout": printed, "stderr": subprocess.STDOUT}
        environ = {**os.environ, "IPYTHONDIR": str(folder), "COLUMNS": "120"}
        with subprocess.Popen([sys.executable, "-c", SHELL], env=environ, **options) as process:
            try:
                with suppress(subprocess.TimeoutExpired):  # the test of the page says so
                    process.wait(SHELL_LIMIT_S)
            finally:
                process.kill()
    texts = (folder / "printed").read_text().split("=== end of page ===\n")
    return dict(zip(pages, [*texts, *[""] * len(pages)], strict=False))


@pytest.mark.timeout(SHELL_LIMIT_S + 50)
@often(*OFTEN_PAGES)
@pytest.mark.parametrize("page", PAGES_WITH_CELLS, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_print_what_the_page_says(page: Path, printed_by_page: dict[Path, str]) -> None:
    """The page's cells run one after another in a real IPython shell, and each prints the text under it."""
    cells, text = cells_and_outputs(page), printed_by_page[page]
    printed = text.split("=== end of cell ===\n")[: len(cells)]
    assert text.count("=== end of cell ===\n") == len(cells), f"the last cells did not come to their end: {text}"
    for (cell, expected), actual in zip(cells, printed, strict=True):
        assert normalise(actual) == normalise(expected), f"the cell\n{cell}\nprinted\n{actual}"


@pytest.mark.timeout(200)
@soak
@pytest.mark.parametrize("page", PAGES_OF_LIBRARIES, ids=lambda page: page.stem)
def test_cells_with_libraries_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    """The same for a page that needs a library, in a shell of its own."""
    library = prepare_library(page)
    cells = cells_and_outputs(page)
    done = subprocess.run(
        [sys.executable, "-c", SHELL],
        input=json.dumps([[cell for cell, _ in cells]]),
        env={**os.environ, "IPYTHONDIR": str(tmp_path), "COLUMNS": "120", **library},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    printed = done.stdout.split("=== end of cell ===\n")[: len(cells)]
    for (cell, expected), actual in zip(cells, printed, strict=True):
        assert normalise(actual) == normalise(expected), f"the cell\n{cell}\nprinted\n{actual}"


RESULT = re.compile(r"^(?:\[ranks? [\d,]+\] )?((?:loss|bias) \d\.\d{4})$", re.MULTILINE)
WITHOUT_PAIR = {"ddip": "cannot run here", "nnhandler": "on no package registry"}


@pytest.mark.parametrize("page", sorted(MIGRATE.glob("*.md")), ids=lambda page: page.stem)
def test_migration_pages_have_their_parts(page: Path) -> None:
    """One sentence, a table, programs of which both print one number, and what is lost; or why a program is not run."""
    text = page.read_text()
    assert text.count("**What changes:**") == 1
    assert "\n| - old line | + new line | difference |\n" in text
    assert "\n## What is lost, and what stays\n" in text
    printed = RESULT.findall(text)
    if page.stem in WITHOUT_PAIR:
        assert WITHOUT_PAIR[page.stem] in text
    else:
        assert len(printed) >= 2
        assert len(set(printed)) == 1


CALL = re.compile(r"(?<![\w.])(loop|session|trainer)\.([a-z]\w*)\(")
OTHERS_TRAINER = ("lightning", "transformers")
"""Pages whose `trainer` is that of a different library."""


@for_each([page for page in PAGES if page.stem != "CHANGELOG"])
def test_pages_call_methods_that_there_are(page: Path) -> None:
    """In programs, fragments and sentences; and a fragment that does not run here compiles."""
    text = page.read_text()
    reference = "".join(each.read_text() for each in (ROOT / "docs" / "reference").glob("*.md"))
    called = {each for each in CALL.findall(text) if each[0] != "trainer" or page.stem not in OTHERS_TRAINER}
    assert [f"{name}.{method}" for name, method in called if f"{name.title()}.{method}(" not in reference] == []
    for kind, code in FENCE.findall(text):
        if kind == "py":
            compile(re.sub(r"^%.*\n", "", code, flags=re.MULTILINE), str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_readme_is_two_screens() -> None:
    """What does not fit has a page of its own."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


def test_pages_with_snippets_are_found() -> None:
    """The two tests above have something to look at."""
    assert [path.name for path in PAGES if cells_and_outputs(path)] >= ["README.md"]
    assert relative_links(ROOT / "README.md")


@for_each([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
def test_pages_name_no_path_of_a_machine(path: Path) -> None:
    """A reader's machine has other folders."""
    assert not re.search(r"/(root|home|work|Users)/", path.read_text())


def test_pages_say_the_same_of_what_ran_on_gpus() -> None:
    """All pages with marks, docs/gpus.md, tests/gpu/README.md and the README are what docs/gpu_runs.json says."""
    gpus = load_script("render_gpus")
    for path, text in gpus.render_pages(gpus.read_runs()).items():
        assert path.read_text() == text, f"run `make reference` and commit {path.relative_to(ROOT)}"
    for path in (ROOT / "docs/gpus.md", ROOT / "tests/gpu/README.md"):
        assert gpus.render_table(gpus.read_runs()) in path.read_text()
    assert gpus.render_state(gpus.read_runs()) in (ROOT / "README.md").read_text()


def test_compatibility_has_three_states_and_dates() -> None:
    """Each row of docs/compatibility.json is in one state; what ran by hand has a date. A run on a GPU is a row."""
    gpus = load_script("render_gpus")
    for row in json.loads((ROOT / "docs" / "compatibility.json").read_text())["rows"]:
        assert row["state"] in gpus.STATES
        assert bool(re.fullmatch(r"2\d{3}-\d\d-\d\d", row.get("when", ""))) == (row["state"] == "by hand"), row
    assert "| Linux x86-64, NVIDIA GPUs |  |  | nccl | never |" in gpus.render_compatibility([])
    run = {"made": "2030-01-02T", "devices": "2 x H100", "ok": 30, "failed": [], "not_shown": 4}
    shown = gpus.render_compatibility([{**run, "versions": {"python": "3.12", "torch": "2.15"}}])
    assert "| Linux x86-64, 2 x H100 | 3.12 | 2.15 | nccl | by hand | 2030-01-02 | 30 ok, 0 failed, 4 not" in shown


def test_pages_claim_the_releases_of_torch_that_have_been_run() -> None:
    """From the lowest that the package allows to the newest in docs/compatibility.json."""
    rows = json.loads((ROOT / "docs" / "compatibility.json").read_text())["rows"]
    releases = [f"2.{minor}" for row in rows for minor in re.findall(r"\b2\.(\d+)", row.get("torch", ""))]
    newest = max(releases, key=lambda text: int(text[2:]))
    for page in ("install.md", "compatibility.md"):
        assert f"torch 2.6 to {newest} have been run" in (ROOT / "docs" / page).read_text()
    assert '"torch>=2.6"' in (ROOT / "pyproject.toml").read_text()


def test_a_report_of_gpu_check_becomes_a_row(tmp_path: Path) -> None:
    """Date, devices, versions and what failed by name; a report without devices is refused."""
    gpus = load_script("render_gpus")
    report = {
        "made": "2030-01-02T03:04:05Z",
        "devices": [{"name": "H100"}, {"name": "H100"}],
        "torch": "2.13.0",
        "nccl": None,
        "counts": {"ok": 30, "failed": 1, "cannot be shown": 4},
        "checks": [{"name": "mig_slices", "status": "failed"}, {"name": "group_of_one", "status": "ok"}],
    }
    run = gpus.summarise(report, "31 passed")
    assert (
        "| 2030-01-02 | 2 x H100 | torch 2.13.0 | 30 ok, 1 failed (mig_slices), 4 not shown there | 31 passed |"
        in gpus.render_table([run])
    )
    assert gpus.render_state([run]).startswith("last run on 2030-01-02 on 2 x H100: 30 ok, 1 failed (mig_slices)")
    with pytest.raises(SystemExit, match="without an accelerator"):
        gpus.summarise(report | {"devices": []}, "")


def load_script(name: str) -> ModuleType:
    """A script of docs as a module."""
    spec = spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PACKAGE = ROOT / "src" / "ddpilot"
DOTTED = re.compile(r"\bddpilot((?:\.[A-Za-z_]\w*)+)")
CODE_PATH = re.compile(r"`([\w./-]*/[\w.-]*(?:\.py)?)`")
FINDING_PAGES = sorted((PACKAGE / "findings" / "pages").glob("*.md"))
# Pages about the inside of ddpilot, or about earlier versions.
FOR_CONTRIBUTORS = {"CONTRIBUTING.md", "CHANGELOG.md", "how_it_works.md"}
PUBLIC_MODULES = ("callbacks", "watch", "integrations.lightning")
# Entry points; a module that decision 002 rejects; tables and files of settings.
NO_MODULES = ("apps", "launch.local", "lint", "slurm", "toml")


def is_there(dotted: str) -> bool:
    """True if ddpilot has the module, or if the source of the module before the last dot has the name after it."""
    for path in (PACKAGE / f"{dotted.replace('.', '/')}.py", PACKAGE / dotted.replace(".", "/") / "__init__.py"):
        if path.exists():
            return True
    home, _, name = dotted.rpartition(".")
    sources = [PACKAGE / f"{home.replace('.', '/')}.py", PACKAGE / home.replace(".", "/") / "__init__.py"]
    return any(path.exists() and re.search(rf"\b{name}\b", path.read_text()) for path in sources)


@for_each([*PAGES, *FINDING_PAGES], lambda page: page.relative_to(ROOT))
def test_modules_and_names_on_pages_exist_and_are_public(page: Path) -> None:
    """`ddpilot.x.y` is there; on a page for users it is a public name, or one of a public module."""
    names = [name[1:] for name in DOTTED.findall(page.read_text()) if name[1:] not in NO_MODULES]
    if page.name == "CHANGELOG.md":
        return
    assert [name for name in names if not is_there(name)] == []
    if page.name in FOR_CONTRIBUTORS or page.parent.name == "decisions":
        return
    public = {*ddpilot.__all__, *PUBLIC_MODULES}
    inside = [name for name in names if name.partition(".")[0] not in public and not name.startswith(PUBLIC_MODULES)]
    assert inside == [], "users import from `ddpilot` and its public modules only"


@for_each([*PAGES, *FINDING_PAGES], lambda page: page.relative_to(ROOT))
def test_paths_on_pages_exist(page: Path) -> None:
    """A path of this repository in code font is there: from its root, or on pages for contributors from the package."""
    paths = [path for path in CODE_PATH.findall(page.read_text()) if path.split("/")[0] in known_folders(page)]
    gone = [path for path in paths if not (ROOT / path).exists() and not (PACKAGE / path).exists()]
    assert page.name == "CHANGELOG.md" or gone == []


@for_each([*PAGES, *FINDING_PAGES], lambda page: page.relative_to(ROOT))
def test_programs_and_commands_on_pages_exist(page: Path) -> None:
    """`python -m x.y` names a module of this repository, and `make x` in code font a verb of the Makefile."""
    text = page.read_text()
    programs = re.findall(r"python -m ((?:tests|benchmarks)[\w.]+)", text)
    assert [name for name in programs if not (ROOT / f"{name.replace('.', '/')}.py").exists()] == []
    verbs = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= set(verbs)


def known_folders(page: Path) -> set[str]:
    """First parts of paths in this repository; other paths on a page are examples of a user's files."""
    ours = {"src", "tests", "docs", "examples", "benchmarks"}
    if page.name in FOR_CONTRIBUTORS:
        ours |= {path.name for path in PACKAGE.iterdir()}
    return ours


def test_the_diff_of_the_loop_tutorial_is_that_of_the_examples() -> None:
    """Its lines without + are the function of the plain example, those without - that of the other one."""
    diff = re.search(r"^```diff\n(.*?)^```$", (ROOT / "docs/tutorials/loop.md").read_text(), re.MULTILINE | re.DOTALL)
    assert diff is not None
    for name, other in (("digits_plain.py", "+"), ("digits_loop.py", "-")):
        lines = [line[1:] for line in diff[1].splitlines() if not line.startswith(other)]
        assert "\n".join(lines) in (ROOT / "examples" / name).read_text()


def test_table_of_changes_leads_to_modules() -> None:
    """ "To change X, go to Y" has a row for at least 20 questions, each with a module or folder of the package."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## To change X, go to Y\n")[2].partition("\nTo add\n")[0]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| ") and not row.startswith("| **")][2:]
    places = [re.findall(r"`([\w/]+(?:\.py|/))`", where) for _, where in rows]
    assert len(rows) >= 20
    assert all(places)
    assert [path for paths in places for path in paths if not (PACKAGE / path).exists()] == []


def test_map_of_rooms_is_what_the_packages_say() -> None:
    """CONTRIBUTING.md has the first line of every package, in the order of the floors."""
    rooms = load_script("render_rooms")
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert page == rooms.render_page(page), "run `make reference` and commit CONTRIBUTING.md"


@for_each(sorted(PACKAGE.glob("*/**/__init__.py")))
def test_every_package_says_what_it_is_for_and_what_it_imports(path: Path) -> None:
    """In its docstring, whose first line is its row in the map."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert 20 < len(text.partition("\n")[0]) <= 117
    assert re.search(r"\b[Ii]mports?\b", text), text


@pytest.mark.parametrize("heading", ["A launch", "An all_reduce that hangs", "One update of a Loop"])
def test_walks_name_each_module_once(heading: str) -> None:
    """A reader follows the modules in the order of the steps, and never goes back."""
    page = (ROOT / "docs" / "explanation" / "how_it_works.md").read_text()
    walk = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    modules = re.findall(r"`([\w/]+\.py)`", walk)
    assert len(modules) >= 15
    assert sorted(modules) == sorted(set(modules))
