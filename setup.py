# SPDX-License-Identifier: Apache-2.0
"""Puts `ddpilot_watch.pth` beside the package, in a wheel and in an editable installation; else pyproject.toml counts.

Python reads such files when it starts: with it, DDPILOT_WATCH=1 reaches ranks whose script knows nothing of ddpilot.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

NAME = "ddpilot_watch.pth"
LINE = "import os; os.environ.get('DDPILOT_WATCH') == '1' and __import__('ddpilot.watch.at_startup')\n"


class BuildPy(build_py):
    """For a wheel: its root is what stands in `build_lib`."""

    def run(self) -> None:
        """Build, and add the file."""
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, NAME).write_text(LINE)


class EditableWheel(editable_wheel):
    """For an editable installation: its wheel's root is a temporary folder."""

    def _run_build_commands(self, dist_name: str, unpacked_wheel: Any, build_lib: Any, tmp_dir: Any) -> Any:
        built = super()._run_build_commands(dist_name, unpacked_wheel, build_lib, tmp_dir)
        Path(unpacked_wheel, NAME).write_text(LINE)
        return built


setup(cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel})
