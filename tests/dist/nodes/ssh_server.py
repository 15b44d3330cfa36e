# SPDX-License-Identifier: Apache-2.0
"""An sshd of our own on this machine, which answers to the names node1, node2, ...: a host of a session for each."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

HOSTS = ("node1", "node2")
"""Names of this machine for the hosts of a session."""

_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_START_S = 10.0

_SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized
PidFile {folder}/sshd.pid
PasswordAuthentication no
StrictModes no
UsePAM no
"""
_CLIENT = """\
Host node* login
  HostName 127.0.0.1
  Port {port}
  User {user}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking no
  LogLevel ERROR
"""


class SshServer:
    """An sshd with keys and a configuration of its own in `folder`; `around`: words in front of its command.

    `command`: an ssh that knows its names.
    """

    def __init__(self, folder: Path, *, around: Sequence[str] = ()) -> None:
        self.folder = folder
        self._around = around
        self.command = f"ssh -F {shlex.quote(str(folder / 'ssh_config'))}"

    def open(self) -> None:
        """Start it; returns when it listens."""
        assert _SSHD is not None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        for name in ("host_key", "user_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(words, check=True, timeout=20)
        shutil.copy(self.folder / "user_key.pub", self.folder / "authorized")
        values = {"port": self.port, "folder": self.folder, "user": getpass.getuser()}
        (self.folder / "sshd_config").write_text(_SERVER.format(**values))
        (self.folder / "ssh_config").write_text(_CLIENT.format(**values))
        words = [_SSHD, "-D", "-f", str(self.folder / "sshd_config"), "-E", str(self.folder / "sshd.log")]
        # sshd wants a folder in /run, which it gets for itself alone.
        own_run = f"mount -t tmpfs tmpfs /run && mkdir /run/sshd && exec {shlex.join(words)}"
        self._process = subprocess.Popen(
            [*self._around, "unshare", "--mount", "sh", "-c", own_run], start_new_session=True
        )
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise RuntimeError(f"sshd did not start: {self.log()}")

    def log(self) -> str:
        """What it has logged."""
        path = self.folder / "sshd.log"
        return path.read_text() if path.exists() else ""

    def processes(self) -> list[psutil.Process]:
        """Every process that was started through it and is still there."""
        found = []
        for child in psutil.Process(self._process.pid).children(recursive=True):
            try:
                if child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return found

    def hosts(self) -> list[psutil.Process]:
        """The host processes of sessions, in the order of their start."""
        found = [each for each in self.processes() if any("session.host" in word for word in each.cmdline()[1:4])]
        return sorted(found, key=lambda each: each.create_time())

    def close(self) -> None:
        """End it, and everything started through it."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(10)


@contextmanager
def ssh_server(folder: Path, *, around: Sequence[str] = ()) -> Iterator[SshServer]:
    """A server for tests, `around` in front of its command; skips them, with the reason, where none can be started."""
    if _SSHD is None or shutil.which("ssh") is None:
        pytest.skip("hosts over ssh need `ssh` and `sshd`, which are not installed")
    if os.geteuid() != 0:
        pytest.skip("an sshd of our own needs root, for a folder in /run")
    server = SshServer(folder, around=around)
    try:
        server.open()
    except RuntimeError as error:
        pytest.skip(str(error))
    try:
        yield server
    finally:
        server.close()
