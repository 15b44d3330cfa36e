# SPDX-License-Identifier: Apache-2.0
"""As a program (`python -m tests.slurm.install`): install Slurm, sshd and shellcheck, which tests start, if it can.

As root, from the packages of Debian and Ubuntu. Elsewhere it prints what is missing, and those tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess

PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "munged": "munge",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "shellcheck": "shellcheck",
}
"""By program, the package that has it."""


def find_missing() -> list[str]:
    """Return the programs that are not installed; daemons are where root's PATH has them."""
    path = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin"
    return [name for name in PACKAGES if shutil.which(name, path=path) is None]


def main() -> None:
    """Install what is missing and print what is there."""
    missing = find_missing()
    apt = shutil.which("apt-get") if os.geteuid() == 0 else None
    if missing and apt:
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        packages = sorted({PACKAGES[name] for name in missing})
        for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
            print("$", apt, *words, flush=True)
            done = subprocess.run([apt, *words], env=environ, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                print("\n".join((done.stdout + done.stderr).splitlines()[-5:]))
        missing = find_missing()
    print(f"not installed: {', '.join(missing)}: tests that start them are skipped" if missing else "Slurm: installed")


if __name__ == "__main__":
    main()
