# SPDX-License-Identifier: Apache-2.0
"""The pages in docs/sites: their commands are typed into a terminal of a real Slurm, and print what the pages say."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from tests.dist.launching.scripts import wait_until
from tests.dist.nodes.ssh_server import ssh_server
from tests.slurm.cluster import Cluster
from tests.slurm.terminal import TYPED, Terminal, open_terminal
from tests.soak import soak
from tests.test_docs import FENCE, FILE, ROOT, by_rank, is_like

PAGES = ROOT / "docs" / "sites"
_JOB = re.compile(r"\bjob (?:allocation )?(\d+)")
_WITH_JOB = re.compile(r"(slurm (?:follow|status|cancel)) (\d+)")
_PENDING = re.compile(
    r"^ddpilot: (waiting for )?job \d+(, which)? is pending.*\n|^ddpilot: job \d+ was granted\n", re.M
)

_IN_ANY_ORDER = re.compile(r"(?:^\d+: .*\n)+|(?:^\[rank \d+\] .*\n)+", re.M)
"""Lines of tasks, or of ranks."""


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a page in that language."""
    return [fence[2] for fence in FENCE.finditer((PAGES / f"{page}.md").read_text()) if fence[1] == language]


def write_files(folder: Path) -> None:
    """Write the script of the page on login nodes, which the others use too."""
    for text in blocks("login_node", "py"):
        found = FILE.match(text)
        assert found is not None
        (folder / found["name"]).write_text(text)


def type_block(cluster: Cluster, terminal: Terminal, block: str, jobs: dict[str, str]) -> None:
    """Type the commands of a block, each at the prompt that the page shows, and compare what they print.

    `jobs`: numbers of jobs by that on the page; Slurm chooses others. Pages name the first nodes, so that a command
    waits until the nodes of the job before are free.
    """
    for prompt, typed, expected in TYPED.findall(block):
        assert terminal.prompt == prompt, f"before `{typed}`"
        cluster.wait_freed()
        command = _WITH_JOB.sub(lambda found: f"{found[1]} {jobs[found[2]]}", typed)
        printed = terminal.type(command)
        for on_page, actual in zip(_JOB.findall(expected), _JOB.findall(printed), strict=False):
            jobs.setdefault(on_page, actual)
        assert is_like(_plain(printed, {}), _plain(expected, jobs)), f"`{typed}` printed\n{printed}"


def _label(line: str) -> str:
    return re.split(r"[]:]", line)[0]


def _plain(text: str, jobs: Mapping[str, str]) -> str:
    """Without empty lines and pending jobs, each rank's lines apart, with the numbers of jobs that Slurm chose."""
    text = re.sub(r"\n+", "\n", _PENDING.sub("", text)).lstrip("\n")
    text = re.sub(r"^.*$", lambda found: "\n".join(by_rank(found[0])), text, flags=re.M)
    text = _IN_ANY_ORDER.sub(lambda found: "".join(sorted(found[0].splitlines(keepends=True), key=_label)), text)
    return _JOB.sub(lambda found: found[0].replace(found[1], jobs.get(found[1], found[1])), text)


def type_page(cluster: Cluster, folder: Path, page: str, *programs: Path) -> None:
    """Type all commands of a page in one terminal. `programs`: folders in front of PATH."""
    write_files(folder)
    jobs: dict[str, str] = {}
    with open_terminal(cluster, folder, programs) as terminal:
        for block in blocks(page, "console"):
            type_block(cluster, terminal, block, jobs)


def test_login_node(cluster: Cluster, tmp_path: Path) -> None:
    """Doctor, script, notebook; then nodes without internet, and an interpreter that is not there."""
    (tmp_path / "work").mkdir()
    type_page(cluster, tmp_path / "work", "login_node")


def test_salloc(cluster: Cluster, tmp_path: Path) -> None:
    """Shell and notebook on the first node of an allocation; then a folder that is not shared."""
    (tmp_path / "work").mkdir()
    slurmds = [int((cluster.folder / f"slurmd.{node}.pid").read_text()) for node in ("n1", "n2")]
    for pid in slurmds:  # in the mounts of that node alone
        words = ["nsenter", f"--target={pid}", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        subprocess.run(words, check=True, timeout=20)
    type_page(cluster, tmp_path / "work", "salloc")
    for pid in slurmds:
        subprocess.run(["nsenter", f"--target={pid}", "--mount", "umount", "/mnt"], check=True, timeout=20)


APPTAINER = """\
#!/bin/sh
# In place of Apptainer: no image is opened, the command runs as it is.
shift
[ -e "$1" ] || { echo "FATAL:   could not open image $1: no such file or directory" >&2; exit 255; }
shift
exec "$@"
"""


@soak
def test_container_with_a_stand_in_for_apptainer(cluster: Cluster, tmp_path: Path) -> None:
    """The command lines run; an image that is not there, and a Slurm without Pyxis, are named. No real container."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.sif").touch()
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "apptainer"
    stand_in.write_text(APPTAINER)
    stand_in.chmod(0o755)
    type_page(cluster, folder, "container", stand_in.parent)


@contextmanager
def tunnel(ssh: str, command: str) -> Iterator[int]:
    """The page's command for the laptop, by this ssh and on a free port of ours, which is yielded."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [*shlex.split(ssh), *shlex.split(command.replace("8888:", f"{port}:"))[1:]]
    with subprocess.Popen(words) as process:
        try:
            wait_until(lambda: _listens(port), limit_s=20)
            yield port
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as ours:
        return ours.connect_ex(("127.0.0.1", port)) == 0


class Browser:
    """A notebook's kernel behind a Jupyter server, by its addresses for browsers."""

    def __init__(self, port: int, token: str) -> None:
        websocket = pytest.importorskip("websocket")
        words = {"Authorization": f"token {token}"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/api/kernels", b"{}", words)
        with urllib.request.urlopen(request, timeout=60) as answer:
            kernel = json.load(answer)["id"]
        self._socket = websocket.create_connection(
            f"ws://127.0.0.1:{port}/api/kernels/{kernel}/channels?token={token}", timeout=60, suppress_origin=True
        )

    def run(self, code: str) -> str:
        """Run a cell; the text that it shows in the end."""
        message_id, shown = uuid.uuid4().hex, dict[str, str]()
        header = {"msg_id": message_id, "msg_type": "execute_request", "session": "s", "username": "", "version": "5.3"}
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        message = {"channel": "shell", "header": header, "parent_header": {}, "metadata": {}, "content": content}
        self._socket.send(json.dumps(message))
        while True:
            got = json.loads(self._socket.recv())
            kind, content = got["header"]["msg_type"], got["content"]
            if got["parent_header"].get("msg_id") != message_id:
                continue
            if kind == "stream":
                shown[f"{len(shown)}"] = content["text"]
            elif kind in ("display_data", "update_display_data", "execute_result"):
                name = content.get("transient", {}).get("display_id") or f"{len(shown)}"
                shown[name] = content["data"].get("text/plain", "") + "\n"
            elif kind == "status" and content["execution_state"] == "idle":
                return "".join(shown.values())

    def close(self) -> None:
        """Leave; the kernel stays."""
        self._socket.close()


@pytest.mark.timeout(180)
def test_jupyter(cluster: Cluster, tmp_path: Path) -> None:
    """A server in a job, an ssh tunnel through the login node, and cells of a notebook; without JupyterLab's pages."""
    pytest.importorskip("jupyter_server")
    folder = tmp_path / "work"
    folder.mkdir()
    (script,) = (text for text in blocks("jupyter", "bash") if text.startswith("#!"))
    settings = tmp_path / "home" / ".jupyter" / "jupyter_server_config.py"
    settings.parent.mkdir(parents=True)
    settings.write_text("c.ServerApp.allow_root = True\n")  # users are not root
    (folder / "jupyter.sh").write_text(script.replace("jupyter lab", "jupyter server"))
    submit, laptop, reach = blocks("jupyter", "console")
    with (
        ssh_server(tmp_path, around=cluster.on_login()) as server,
        open_terminal(cluster, folder) as terminal,
    ):
        jobs: dict[str, str] = {}
        first, look = submit.split("login$ until")
        type_block(cluster, terminal, first, jobs)
        for text in (f"login$ until{look}", laptop):
            text = text.replace("jupyter-2", f"jupyter-{jobs['2']}").replace("20002", str(20000 + int(jobs["2"])))
            type_block(cluster, terminal, text, jobs)
        token = re.search(r"token=(\w+)", (folder / f"jupyter-{jobs['2']}.out").read_text())
        assert token is not None
        with tunnel(server.command, text.removeprefix("laptop$ ")) as port, closing(Browser(port, token[1])) as browser:
            for cell, shown in cells("jupyter"):
                printed = browser.run(cell)
                assert is_like(_plain(_by_rank(printed), {}), shown), f"{cell} showed\n{printed}"
        type_block(cluster, terminal, reach, jobs)


def _by_rank(text: str) -> str:
    """`text` with the lines of ranks in their order."""
    lines = text.splitlines(keepends=True)
    return "".join(sorted(lines) if text.startswith("[rank") else lines)


def cells(page: str) -> list[tuple[str, str]]:
    """Each cell of a page, with the text under it."""
    fences = FENCE.findall((PAGES / f"{page}.md").read_text())
    return [(fence[1], after[1]) for fence, after in pairwise(fences) if (fence[0], after[0]) == ("py", "text")]
