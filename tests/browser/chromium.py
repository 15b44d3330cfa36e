# SPDX-License-Identifier: Apache-2.0
"""Find a Chromium for the browser tests; as a program (`python -m tests.browser.chromium`) install one where none is.

A distribution's package comes first: package mirrors are in reach of more machines than Playwright's download site.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

VARIABLE = "DDPILOT_CHROMIUM"
"""Names the executable to use, instead of the first that is found."""

_NAMES = ("chromium-headless-shell", "chromium", "google-chrome-stable", "google-chrome", "chromium-browser")
_PACKAGES = ("chromium-headless-shell", "chromium")
_FIX = f"""Install one, then run this again:
  Debian                     as root: apt install chromium
  Ubuntu, Fedora, macOS ...  {sys.executable} -m playwright install --with-deps chromium
  or name one                {VARIABLE}=/path/to/chrome"""


class NoChromiumError(Exception):
    """There is no Chromium that runs; the text says where it was looked for and what to do."""


def find_chromium() -> str:
    """Path of the executable. Raises NoChromiumError."""
    if named := os.environ.get(VARIABLE):
        if not _runs(named):
            raise NoChromiumError(f"{VARIABLE}={named}: no browser that runs. Name another one, or unset it.")
        return named
    for path in filter(None, map(shutil.which, _NAMES)):
        if _runs(path):
            return path
    if own := _playwrights_own():
        return own
    raise NoChromiumError(f"looking for a browser: none of {', '.join(_NAMES)} is there and runs.\n{_FIX}")


def install_chromium() -> str:
    """Install one, as root from the distribution, else Playwright's own; its path. Raises NoChromiumError."""
    apt = shutil.which("apt-get") if os.geteuid() == 0 else None
    commands = [[apt, "install", "-y", "-qq", "--no-install-recommends", package] for package in _PACKAGES if apt]
    commands.append([sys.executable, "-m", "playwright", "install", "chromium"])
    failed = [_run([apt, "update", "-qq"])] if apt else []
    for command in commands:
        failed.append(_run(command))
        try:
            return find_chromium()
        except NoChromiumError as error:
            last = error
    raise NoChromiumError("\n".join([*filter(None, failed), str(last)])) from last


def _run(command: list[str]) -> str:
    """Say it and run it; its last lines where it failed, "" where not."""
    print("$", *command, flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
    return f"{' '.join(command)} ended with {done.returncode}:\n{said}" if done.returncode else ""


def _runs(path: str) -> bool:
    # Ubuntu's `chromium-browser` is a script which only says that one should install something else.
    try:
        asked = subprocess.run([path, "--version"], capture_output=True, timeout=60, check=False)
    except OSError:
        return False
    return asked.returncode == 0 and b"Chrom" in asked.stdout


def _playwrights_own() -> str | None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = Path(playwright.chromium.executable_path)
    return str(path) if path.exists() else None


def main() -> int:
    """Say which Chromium there is, after installing one where there is none; the exit status."""
    try:
        try:
            found = find_chromium()
        except NoChromiumError:
            if VARIABLE in os.environ:
                raise
            found = install_chromium()
    except NoChromiumError as error:
        print(f"make test-browser: {error}", file=sys.stderr)
        return 1
    print(f"browser: {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
