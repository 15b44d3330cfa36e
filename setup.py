# SPDX-License-Identifier: Apache-2.0
"""Install `ddpilot_watch.pth` next to the package, and set the project's links. Everything else is in pyproject.toml.

Python reads `.pth` files when it starts: with it, DDPILOT_WATCH=1 reaches scripts without ddpilot.
The links are made from `PROJECT_URL`; without an address the metadata has none.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

NAME = "ddpilot_watch.pth"
LINE = "import os; os.environ.get('DDPILOT_WATCH', '0') not in '0' and __import__('ddpilot.watch.at_startup')\n"


class BuildPy(build_py):
    """For a wheel, whose root is the folder `build_lib`."""

    def run(self) -> None:
        """Build, and add the file."""
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, NAME).write_text(LINE)


class EditableWheel(editable_wheel):
    """For an editable installation, whose wheel has a temporary folder as its root."""

    def _run_build_commands(self, dist_name: str, unpacked_wheel: Any, build_lib: Any, tmp_dir: Any) -> Any:
        built = super()._run_build_commands(dist_name, unpacked_wheel, build_lib, tmp_dir)
        Path(unpacked_wheel, NAME).write_text(LINE)
        return built


def project_links() -> dict[str, str]:
    """Return the links of the metadata by label; empty while the project has no address."""
    address = runpy.run_path(str(Path(__file__).parent / "src" / "ddpilot" / "_project.py"))["PROJECT_URL"]
    paths = {"Homepage": "", "Source": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}
    return {label: address + path for label, path in paths.items()} if address else {}


setup(cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel}, project_urls=project_links())
