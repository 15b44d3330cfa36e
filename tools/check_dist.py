# SPDX-License-Identifier: Apache-2.0
"""Build the sdist and the wheel, check what is in them, and try the wheel in fresh environments: `make dist`.

A pair is a Python and a torch, such as `3.11:newest`, `3.12:lowest` or `3.11:2.13.0`. `lowest` installs every
dependency of the wheel in the lowest release that the wheel allows. Each pair gets a fresh environment, in which the
quickstart notebook, a script on two ranks, a job that hangs under torchrun, and a test in a Jupyter kernel run. In the
first environment, mypy and pyright also check user programs against the installed wheel.

torch comes from the index that pip is configured for. Its CUDA builds take about 6 GB per environment, which is removed
after its pair; to use a smaller build, set PIP_INDEX_URL or PIP_FIND_LINKS.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.dist_contents import find_faults, lowest_requirements

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("lowest", "newest")
NEEDED_BYTES = 12 * 2**30
"""Free disk space that a pair asks for: the downloads of a CUDA build of torch, and the environment."""

NOTEBOOK_TEST = "tests/notebook/test_launch_notebook.py"
PROGRAMS = ("tests/typing/program.py", "tests/typing/api.py")
TEST_REQUIREMENTS = ("matplotlib", "nbclient", "nbformat", "pytest", "pytest-timeout", "scikit-learn")

HANG = """\
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.barrier()
else:
    dist.all_gather_object([None, None], dist.get_rank())
"""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A Python, such as "3.11", and a torch: "lowest", "newest" or a version."""

    python: str
    torch: str

    def __str__(self) -> str:
        return f"{self.python}:{self.torch}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a pair: `torch` is the version that was installed, `detail` why it failed or was not run."""

    pair: Pair
    state: str
    """ "passed", "FAILED" or "not run"."""
    torch: str = ""
    detail: str = ""
    wall_s: float = 0.0


class StepError(Exception):
    """A command that had to succeed did not: which one, and the end of what it printed."""


def parse_pair(text: str) -> Pair:
    """Parse `3.11:newest`; raise an ArgumentTypeError that shows the form."""
    if not re.fullmatch(r"3\.1\d:(lowest|newest|\d+(\.\d+)+)", text):
        examples = "3.11:newest, 3.12:lowest or 3.11:2.13.0"
        raise argparse.ArgumentTypeError(f"{text!r} is not PYTHON:TORCH, such as {examples}")
    python, torch = text.split(":")
    return Pair(python=python, torch=torch)


def find_python(version: str) -> Path | None:
    """Return an interpreter of `version`, such as "3.11": this one, one on the PATH or of pyenv; None if missing."""
    candidates = [sys.executable, shutil.which(f"python{version}")]
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates += [str(path) for path in sorted(root.glob(f"versions/{version}.*/bin/python"))]
    probe = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    for path in filter(None, candidates):
        done = subprocess.run([path, "-c", probe], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return Path(path)
    return None


def run_step(what: str, *argv: str | Path, cwd: Path, timeout_s: float = 900.0, fails: bool = False, **env: str) -> str:
    """Run a command and return what it printed. Raise StepError if it fails, or, with `fails`, if it does not.

    The command sees neither this environment's packages nor variables of ddpilot, except for those in `env`.
    """
    foreign = ("DDPILOT_", "PYTHON", "VIRTUAL_ENV")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    start = time.monotonic()
    try:
        done = subprocess.run(
            [str(part) for part in argv],
            cwd=cwd,
            env={**environ, "COLUMNS": "160", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StepError(f"{what}: no end after {timeout_s:g} s\n{_tail(_as_text(error.stdout))}") from None
    if (done.returncode != 0) != fails:
        raise StepError(f"{what}: exit status {done.returncode}\n{_tail(done.stdout)}")
    print(f"    {what}: {time.monotonic() - start:.1f} s", flush=True)
    return done.stdout


def _as_text(output: object) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else str(output or "")


def _tail(text: str, num_lines: int = 40) -> str:
    return "\n".join(f"      {line}" for line in text.splitlines()[-num_lines:])


def build(out: Path) -> tuple[Path, Path]:
    """Build both archives into `out`, the wheel from the sdist, check their contents and return (sdist, wheel)."""
    out.mkdir(parents=True)
    run_step("build", sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    run_step("twine check", sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=out)
    faults = find_faults(sdist, wheel, ROOT)
    if faults:
        raise StepError("contents of the archives\n" + "\n".join(f"      {fault}" for fault in faults))
    print("    contents:", ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in (sdist, wheel)))
    return sdist, wheel


def install(pair: Pair, python: Path, wheel: Path, work: Path) -> tuple[Path, str]:
    """Make an environment with the wheel and the torch of `pair`; return its interpreter and torch's version."""
    run_step("venv", python, "-m", "venv", work / "env", cwd=work)
    inside = work / "env" / "bin" / "python"
    asked = lowest_requirements(wheel, pair.python) if pair.torch == "lowest" else []
    asked += [] if pair.torch in TORCHES else [f"torch=={pair.torch}"]
    (work / "lowest.txt").write_text("".join(f"{each}\n" for each in asked))
    pip: list[str | Path] = [inside, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
    packages = [f"ddpilot[notebook] @ {wheel.as_uri()}", *TEST_REQUIREMENTS, *asked]
    run_step("install", *pip, *packages, cwd=work, timeout_s=3000)
    version = run_step("import torch", inside, "-c", "import torch; print(torch.__version__)", cwd=work).split()[-1]
    return inside, version


def check_installed(inside: Path, wheel: Path, work: Path) -> None:
    """Run what a user runs first, in a folder outside of the checkout."""
    for name in ("examples", NOTEBOOK_TEST):
        source, target = ROOT / name, work / Path(name).name
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    command = inside.with_name("ddpilot")
    version = wheel.name.split("-")[1]
    said = run_step("ddpilot --version", command, "--version", cwd=work)
    if said.strip() != f"ddpilot {version}":
        raise StepError(f"ddpilot --version printed {said.strip()!r}, and the wheel is {version}")
    run_step("ddpilot explain", command, "explain", "DDP201", cwd=work)
    run_step("quickstart notebook", inside, "examples/run_quickstart.py", "--out", "out", cwd=work)
    run_step("script on 2 ranks", command, "run", "examples/digits_loop.py", "-n", "2", "--", "--epochs", "1", cwd=work)
    (work / "hang.py").write_text(HANG)
    torchrun: list[str | Path] = [
        inside,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "hang.py",
    ]
    said = run_step("hang under torchrun", *torchrun, cwd=work, timeout_s=120, fails=True, DDPILOT_WATCH="1")
    if "DDP201" not in said or "hang.py:5" not in said:
        raise StepError(f"DDPILOT_WATCH=1 torchrun: no report of DDP201 at hang.py:5\n{_tail(said)}")
    pytest: list[str | Path] = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", Path(NOTEBOOK_TEST).name]
    run_step("notebook test", *pytest, cwd=work)


def check_types(inside: Path, work: Path) -> None:
    """Check the user programs with mypy and pyright against the wheel that is installed next to `inside`."""
    (work / "types").mkdir()
    for name in PROGRAMS:
        shutil.copy(ROOT / name, work / "types")
    (work / "types" / "mypy.ini").write_text("[mypy]\nstrict = true\n")
    (work / "types" / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}\n')
    files = [Path(name).name for name in PROGRAMS]
    mypy: list[str | Path] = [sys.executable, "-m", "mypy", "--python-executable", inside, "--cache-dir", work / "mypy"]
    run_step("mypy", *mypy, *files, cwd=work / "types")
    run_step("pyright", sys.executable, "-m", "pyright", "--pythonpath", inside, cwd=work / "types")


def check_pair(pair: Pair, wheel: Path, folder: Path, *, types: bool) -> Outcome:
    """Run one pair in a fresh environment under `folder`, and remove it."""
    print(f"{pair}", flush=True)
    python = find_python(pair.python)
    if python is None:
        return Outcome(pair=pair, state="not run", detail=f"no Python {pair.python} on the PATH or in pyenv")
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < NEEDED_BYTES:
        detail = f"{free_bytes / 2**30:.0f} GiB free in {folder}, and an environment may need {NEEDED_BYTES >> 30}"
        return Outcome(pair=pair, state="not run", detail=detail)
    start, torch = time.monotonic(), ""
    work = Path(tempfile.mkdtemp(prefix=f"{pair.python}-{pair.torch}-", dir=folder))
    try:
        inside, torch = install(pair, python, wheel, work)
        check_installed(inside, wheel, work)
        if types:
            check_types(inside, work)
    except StepError as error:
        detail = str(error)
        return Outcome(pair=pair, state="FAILED", torch=torch, detail=detail, wall_s=time.monotonic() - start)
    finally:
        shutil.rmtree(work)
    return Outcome(pair=pair, state="passed", torch=torch, wall_s=time.monotonic() - start)


def render_outcomes(outcomes: Sequence[Outcome]) -> str:
    """Return a line per pair: what was run, with which torch, and what was not run, with the reason."""
    lines = []
    for outcome in outcomes:
        version = f"torch {outcome.torch}" if outcome.torch else ""
        time_taken = f"{outcome.wall_s:.0f} s" if outcome.wall_s else ""
        lines.append(f"{outcome.pair!s:<14} {outcome.state:<8} {version:<20} {time_taken:<7} {outcome.detail}".rstrip())
    counts = [f"{sum(each.state == state for each in outcomes)} {state}" for state in ("passed", "FAILED", "not run")]
    return "\n".join([*lines, ", ".join(counts)])


def check_pairs(pairs: Sequence[Pair], wheel: Path, folder: Path) -> Iterator[Outcome]:
    """Run the pairs one after the other; types are checked in the first environment that passes the rest."""
    types = True
    for pair in pairs:
        outcome = check_pair(pair, wheel, folder, types=types)
        types = types and outcome.state != "passed"
        yield outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Build, check and print the table (`argv`, default `sys.argv[1:]`); return 1 if something failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [Pair(python=python, torch=torch) for python in PYTHONS for torch in TORCHES]
    parser.add_argument("pairs", nargs="*", type=parse_pair, metavar="PYTHON:TORCH", help="default: all 8")
    parser.add_argument("--contents-only", action="store_true", help="build and check the archives; no environments")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the archives (default: %(default)s)")
    options = parser.parse_args(argv)
    shutil.rmtree(options.out, ignore_errors=True)
    try:
        _, wheel = build(options.out.absolute())
    except StepError as error:
        print(f"FAILED {error}")
        return 1
    if options.contents_only:
        return 0
    with tempfile.TemporaryDirectory(prefix="ddpilot-dist-") as folder:
        outcomes = list(check_pairs(options.pairs or every, wheel, Path(folder)))
    print(render_outcomes(outcomes))
    return int(any(outcome.state == "FAILED" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
