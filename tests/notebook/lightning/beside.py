# SPDX-License-Identifier: Apache-2.0
"""Run the notebook of this folder with a strategy, cell by cell, each with a limit; print two runs beside each other.

`python -m tests.notebook.lightning.beside` does both: "ddpilot", and Lightning's own "ddp_notebook".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

from tests.notebook.executed import read

NOTEBOOK = Path(__file__).with_name("trainer.ipynb")
SHIMS = Path(__file__).parents[1] / "shims"
_LABELLED = re.compile(r"^\[ranks? [\d,]+\].*\n?", re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """What a cell came to: what the notebook itself printed, and "" or why it did not end well."""

    printed: str
    failed: str
    seconds: float


def run_notebook(strategy: str, folder: Path, *, limit_s: float, more: Sequence[str] = ()) -> dict[str, Shown]:
    """Each cell by its id, and those of `more` by their number; nothing more is run after one that took longer than
    `limit_s` (imports: a minute more)."""
    shown: dict[str, Shown] = {}
    cells = {each.id: each.source for each in read(NOTEBOOK).cells if each.cell_type == "code"}
    cells |= {f"more {number}": source for number, source in enumerate(more)}
    with _kernel(strategy, folder) as client:
        for name, source in cells.items():
            shown[name] = _run(client, source, limit_s + 60 * (name == "imports"))
            if shown[name].failed.startswith("hung"):
                break
    return shown


@contextlib.contextmanager
def _kernel(strategy: str, folder: Path) -> Iterator[BlockingKernelClient]:
    manager = KernelManager()
    path = os.pathsep.join(filter(None, (str(SHIMS), os.environ.get("PYTHONPATH", ""))))
    # Two threads, so that the notebook has a pool of OpenMP's as most have.
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2", "STRATEGY": strategy}
    if strategy != "ddpilot":
        env["TMPDIR"] = str(folder)  # what is killed leaves temporary files of multiprocessing's
    manager.start_kernel(cwd=str(folder), env=env, extra_arguments=["--HistoryManager.enabled=False"])
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        yield client
    finally:
        # Now, before they lose their parent: forks of Lightning's outlive it.
        children = psutil.Process(manager.provisioner.pid).children(recursive=True)  # type: ignore[union-attr]
        client.stop_channels()
        manager.shutdown_kernel(now=strategy != "ddpilot" and bool(children))
        manager.cleanup_resources()
        manager.context.destroy(linger=0)
        if strategy != "ddpilot":
            _end(children)
        ensure_event_loop().close()  # jupyter_client made it, and leaves it open
        asyncio.set_event_loop(None)


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=5)


def _run(client: BlockingKernelClient, source: str, limit_s: float) -> Shown:
    request, start = client.execute(source, store_history=False), time.monotonic()
    printed, failed = "", ""
    while (left_s := start + limit_s - time.monotonic()) > 0:
        try:
            message = client.get_iopub_msg(timeout=left_s)
        except queue.Empty:
            break
        if message["parent_header"].get("msg_id") != request:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "stream" and content["name"] == "stdout":
            printed += content["text"]
        elif kind == "error":
            failed = f"{content['ename']}: {content['evalue'].splitlines()[0][:300] if content['evalue'] else ''}"
        elif kind == "status" and content["execution_state"] == "idle":
            return Shown(_LABELLED.sub("", printed), failed, time.monotonic() - start)
    return Shown(_LABELLED.sub("", printed), f"hung: not done after {limit_s:.0f} s", limit_s)


def render_beside(runs: Mapping[str, Mapping[str, Shown]]) -> str:
    """The cells of all runs, one under the other, each with what it printed or how it failed."""
    names = dict.fromkeys(name for run in runs.values() for name in run)
    lines = []
    for name in names:
        lines.append(f"== {name}")
        for strategy, run in runs.items():
            cell = run.get(name, Shown("", "not reached", 0.0))
            told = [*cell.printed.strip().splitlines(), *filter(None, [cell.failed])] or ["-"]
            lines += [f"{strategy:>12} {cell.seconds:5.1f} s  {told[0]}", *(f"{'':>21}{line}" for line in told[1:])]
    return "\n".join(lines)


def main() -> None:
    """Print the notebook with our strategy beside the same with Lightning's own."""
    runs = {}
    for strategy, limit_s in (("ddpilot", 90.0), ("ddp_notebook", 15.0)):
        with tempfile.TemporaryDirectory() as folder:
            runs[strategy] = run_notebook(strategy, Path(folder), limit_s=limit_s)
    print(render_beside(runs))


if __name__ == "__main__":
    main()
