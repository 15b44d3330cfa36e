# SPDX-License-Identifier: Apache-2.0
"""A JupyterLab of one's own: a port, a token and folders that nobody else uses, and nothing left of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 15.0
_OPTIONS = (
    "--no-browser",
    "--allow-root",
    "--ServerApp.ip=127.0.0.1",
    "--ServerApp.port=0",  # any that is free
    "--ServerApp.terminals_enabled=False",
    "--ServerApp.jpserver_extensions={'jupyter_lsp': False}",
    "--LabApp.extension_manager=readonly",
)
# No test needs this check of the page's first load, nor the two extensions above.
_PAGE_CONFIG = {"buildCheck": False, "buildAvailable": False}
# It would ask, in a box on top of the page, whether it may phone home.
_SETTINGS = {"@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}


class Lab:
    """A running JupyterLab server whose files are in `folder`; notebooks are in `folder / "root"`."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.root.mkdir(parents=True)
        self._log = folder / "log"
        self._settings = folder / "settings"
        for name, values in _SETTINGS.items():
            file = self._settings / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
        page_config = folder / "config" / "labconfig" / "page_config.json"
        page_config.parent.mkdir(parents=True)
        page_config.write_text(json.dumps(_PAGE_CONFIG))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", *_OPTIONS, f"--ServerApp.root_dir={self.root}"],
                env={**os.environ, **_variables(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            about = self._await_start(folder / "runtime" / f"jpserver-{self._process.pid}.json")
        except BaseException:
            self.stop()
            raise
        self.token = str(about["token"])
        self.url = f"http://127.0.0.1:{about['port']}"

    def _await_start(self, file: Path) -> dict[str, Any]:
        end = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < end and self._process.poll() is None:
            if file.exists() and (text := file.read_text()).endswith("}"):
                return dict(json.loads(text))
            time.sleep(0.02)
        raise AssertionError(f"JupyterLab did not start in {_START_LIMIT_S:g} s; it said:\n{self.last_lines()}")

    def put(self, name: str, sources: Sequence[str]) -> str:
        """Write a notebook with these cells (markdown where one begins with "#: "); its name."""
        cells = [
            new_markdown_cell(source[3:]) if source.startswith("#: ") else new_code_cell(source)  # type: ignore[no-untyped-call]
            for source in sources
        ]
        metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nbformat.write(new_notebook(cells=cells, metadata=metadata), self.root / name)  # type: ignore[no-untyped-call]
        return name

    def num_cells(self, name: str) -> int:
        """How many cells a notebook has."""
        return len(nbformat.read(self.root / name, as_version=4).cells)  # type: ignore[no-untyped-call]

    def end_kernels(self) -> None:
        """End every kernel as "Shut Down All" does: each one is asked to, and given the time that it needs."""
        for session in json.loads(self._ask("GET", "/api/sessions")):
            self._ask("DELETE", f"/api/sessions/{session['id']}")

    def forget_theme(self) -> None:
        """The next page is light again."""
        (self._settings / "@jupyterlab/apputils-extension/themes.jupyterlab-settings").unlink(missing_ok=True)

    def _ask(self, method: str, path: str) -> bytes:
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(self.url + path, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=_STOP_LIMIT_S) as answer:
            return bytes(answer.read())

    def last_lines(self) -> str:
        """The end of what the server wrote, kernels' own standard error included."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])

    def stop(self) -> None:
        """End the server and its kernels."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise


def _variables(folder: Path) -> dict[str, str]:
    return {
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "IPYTHONDIR": str(folder / "ipython"),
    }
