# SPDX-License-Identifier: Apache-2.0
"""`ddpilot demo`: the command it runs, and errors about missing parts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ddpilot.cli
from ddpilot.cli.app import find_quickstart
from ddpilot.errors import DdpilotError

PACKAGE = Path(ddpilot.cli.__file__).parents[1]


def copy_checkout(root: Path, script: str | None) -> Path:
    """A source tree with this package and, as its quickstart, `script`; returns its `src`."""
    shutil.copytree(PACKAGE, root / "src" / "ddpilot", ignore=shutil.ignore_patterns("__pycache__"))
    if script is not None:
        (root / "examples").mkdir()
        (root / "examples" / "run_quickstart.py").write_text(textwrap.dedent(script), encoding="utf-8")
    return root / "src"


def start_demo_in(src: Path, *, prelude: str = "") -> subprocess.Popen[str]:
    """`ddpilot demo` of the package in `src`, in a process group of its own."""
    code = f"import sys; sys.argv = ['ddpilot', 'demo']\n{prelude}\nfrom ddpilot.cli.app import main\nmain()"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(src)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_demo_in(src: Path, *, prelude: str = "") -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `start_demo_in`."""
    with start_demo_in(src, prelude=prelude) as process:
        out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def test_find_quickstart_finds_the_example_of_this_checkout() -> None:
    """The tests run in a source tree, which has the script that `make demo` runs."""
    script = find_quickstart(PACKAGE)
    assert script == PACKAGE.parents[1] / "examples" / "run_quickstart.py"
    assert script.is_file()


def test_find_quickstart_says_that_the_examples_are_not_installed(tmp_path: Path) -> None:
    """An installed package is in site-packages, without the examples."""
    with pytest.raises(DdpilotError, match="make demo") as caught:
        find_quickstart(tmp_path / "site-packages" / "ddpilot")
    assert "run_quickstart.py" in caught.value.found


@pytest.mark.parametrize("status", [0, 3])
def test_demo_runs_the_script_with_this_python_and_passes_its_status_on(tmp_path: Path, status: int) -> None:
    """What the script prints is seen, and how it ended is how the command ends."""
    script = f"import sys\nprint('ran with', sys.executable, sys.argv[1:])\nsys.exit({status})\n"
    returncode, out, err = run_demo_in(copy_checkout(tmp_path, script))
    assert returncode == status, err
    assert out == f"ran with {sys.executable} []\n"


def test_demo_lets_the_script_clean_up_when_it_is_interrupted(tmp_path: Path) -> None:
    """Ctrl-C reaches both; the command waits for the script, which stops its kernel."""
    script = """
        import signal, threading
        def stop(*_):
            print("kernel stopped", flush=True)
            raise SystemExit(0)
        signal.signal(signal.SIGINT, stop)
        print("kernel runs", flush=True)
        threading.Event().wait(20)
    """
    with start_demo_in(copy_checkout(tmp_path, script)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "kernel runs\n"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert out == "kernel stopped\n"
    assert process.returncode != 0
    assert "Traceback" not in err


def test_demo_says_what_is_missing_when_it_has_no_examples(tmp_path: Path) -> None:
    """One block on stderr and status 2."""
    returncode, out, err = run_demo_in(copy_checkout(tmp_path, None))
    assert returncode == 2
    assert err.startswith("error: looking for the quickstart\n  found: no ")
    assert out == ""


def test_demo_names_the_packages_that_are_not_installed(tmp_path: Path) -> None:
    """Before anything starts, by the names to install them by."""
    hide = "import importlib.util as u; real = u.find_spec\n"
    hide += "u.find_spec = lambda name: None if name in ('sklearn', 'nbclient') else real(name)"
    returncode, out, err = run_demo_in(copy_checkout(tmp_path, "print('ran')"), prelude=hide)
    assert returncode == 2
    assert "found: nbclient, scikit-learn not installed in" in err
    assert "-m pip install nbclient scikit-learn" in err
    assert out == ""
