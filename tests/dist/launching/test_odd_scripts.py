# SPDX-License-Identifier: Apache-2.0
"""Scripts that are run in other ways than `python train.py`, or have unlucky names."""

from __future__ import annotations

from pathlib import Path

from tests.dist.launching.scripts import run_script


def test_launch_in_a_script_with_the_name_of_a_module_that_torch_imports_is_refused(tmp_path: Path) -> None:
    """The server imports it, and it launches: without an end to that, servers would start servers for ever."""
    named_like_a_module = tmp_path / "opt_einsum.py"  # torch tries to import that
    named_like_a_module.write_text("import ddpilot\nddpilot.launch(print, nproc_per_node=1)\n")
    outcome = run_script("import opt_einsum\n", tmp_path, may_fail=True)
    assert outcome.code == 1
    assert "this is the rank server, which imported your module: its file has the name of a module" in outcome.err
    assert "Rename the file" in outcome.err


def test_launch_in_a_module_run_with_dash_m_keeps_its_package_and_file(tmp_path: Path) -> None:
    """`python -m package.train`: the function imports relative to its package, and finds files next to it."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "config.py").write_text("WIDTH = 5\n")
    (package / "train.py").write_text(
        "import ddpilot\n"
        "from pathlib import Path\n"
        "def train():\n"
        "    import __main__\n"
        "    from . import config\n"
        "    return config.WIDTH, Path(__file__).name, Path(__main__.__file__).name\n"
        "print(list(ddpilot.launch(train, nproc_per_node=2)))\n"
    )
    outcome = run_script(
        "import runpy; runpy.run_module('package.train', run_name='__main__', alter_sys=True)", tmp_path
    )
    assert outcome.out == f"{[(5, 'train.py', 'train.py')] * 2}\n"


def test_launch_in_a_daemon_with_blocked_signals_and_a_path_object_in_sys_path(tmp_path: Path) -> None:
    """Descriptors 0 to 2 are closed, and stay so; ends of ranks are seen; entries that Python skips do no harm."""
    run_script(
        "import os, pathlib, signal, sys, ddpilot\n"
        "sys.path.append(pathlib.Path('elsewhere'))\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})\n"
        "sys.stdout.flush()\n"
        "os.closerange(0, 3)\n"
        "def stop_in_time():\n"
        "    os.write(2, b'to a closed stderr')\n"
        "    return signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
        "values = list(ddpilot.launch(stop_in_time, nproc_per_node=2))\n"
        "left_open = [fd for fd in range(3) if os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "pathlib.Path('values.txt').write_text(f'{values} {left_open}')\n"
        "os._exit(0)\n",
        tmp_path,
        limit_s=30,
    )
    assert (tmp_path / "values.txt").read_text() == "[set(), set()] []"
