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
    assert "this is the rank server, which imports torch and so ran your module" in outcome.err
    assert "Rename the file" in outcome.err


def test_launch_in_a_module_run_with_dash_m_keeps_its_package_and_file(tmp_path: Path) -> None:
    """`python -m package.train`: the function imports relative to its package, and finds files beside it."""
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
