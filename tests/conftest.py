# SPDX-License-Identifier: Apache-2.0
"""A test that leaks fails, with the list of what it left; every test starts from the same seed."""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.leftovers import MARK, Look, all_pids, look, settle, unused_shared_memory
from tests.soak import mark_what_is_not_often

pytest_plugins = ["pytester"]

# Before torch is imported: its threads would spin while they wait, and on a busy machine a small model takes 20 times
# as long as with threads that sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# nbformat imports it by way of jsonschema, for a check of addresses that it does not ask for: 1 s.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # the import fails, as without the package

CHILDREN = Path(__file__).with_name("children")
COLLECT = "DDPILOT_TESTS_COLLECT"
TORCHMETRICS_ALONE = {"DDPILOT_TESTS_WITHOUT": "matplotlib,scipy,torchvision,transformers"}
"""For processes that import torchmetrics, as Lightning does: what it can do without looks as if it were not there."""

GRACE_S = 2.0
"""How long what a test started may take to be gone after it: the promise that ddpilot makes about its ranks."""


def pytest_configure() -> None:
    """Let tests be interrupted, and interrupt what they start, where a shell has started them in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import all tests without a garbage collection, and leave their modules out of later ones, the last included.

    Keep them compiled, with pytest's assertions, where a variable says that nothing is to be.
    """
    writes_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    yield
    gc.enable()
    sys.dont_write_bytecode = writes_no_bytecode
    gc.freeze()
    atexit.register(gc.freeze)


@pytest.hookimpl(tryfirst=True)  # before `-m soak` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave cases that a test does not name as `often` to the soak."""
    mark_what_is_not_often(items, is_whole=not any("[" in word for word in config.args))


@pytest.fixture(scope="session", autouse=True)
def nothing_left_at_the_end(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Mark this run's processes, keep its temporary files apart, and end with neither a process nor a file left."""
    tmp_path_factory.getbasetemp()  # before TMPDIR moves: pytest keeps its own folders for a look after a failure
    mark = uuid.uuid4().hex
    # Short: a Unix socket's path must fit into 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="dt-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(CHILDREN), os.environ.get("PYTHONPATH")))))
        patch.setenv(COLLECT, "rarely")
        patch.setenv("DDPILOT_TESTS_PID", str(os.getpid()))
        # One for each kind of ranks that most files start; with two, many a file would start its server again: 2 s.
        patch.setattr("ddpilot.launching.rank_server.client._MAX_WARM", 4)
        patch.setenv("DDPILOT_JOBS_DIR", str(tmp_path_factory.mktemp("jobs")))  # of failed jobs some are kept
        before = _long_lived(look(mark))
        yield mark
        stop_rank_servers()
        left = settle(lambda: _long_lived(look(mark, everywhere=True)).since(before), grace_s=GRACE_S)
        left += [f"temporary files: {path.name}" for path in folder.iterdir() if not _is_pythons_own(path)]
    shutil.rmtree(folder)
    assert not left, "after the whole run and after stopping the rank servers, these were left:\n  " + "\n  ".join(left)


def _is_pythons_own(path: Path) -> bool:
    """Whether Python or torch made this temporary file, in a process that was killed while it had it."""
    # pymp-*: of each worker of a DataLoader. The other: tempfile tries whether a folder can be written to.
    is_try = re.fullmatch("[a-z0-9_]{8}", path.name) and path.is_file() and path.read_bytes() in (b"", b"blat")
    return path.name.startswith(("torch", "pymp-")) or bool(is_try)


@pytest.fixture(autouse=True)
def no_leaks(nothing_left_at_the_end: str) -> Iterator[None]:
    """Compare before and after: variables, processes, threads, descriptors, ports, shared memory, a process group."""
    mark = nothing_left_at_the_end
    environment = dict(os.environ)
    known_pids, servers = all_pids(), server_pids()
    before = look(mark, spared_pids=spared_pids(), known_pids=known_pids)
    yield
    left = [*_restore_environment(environment), *_leave_process_group()]

    def new_leftovers() -> list[str]:
        return _new_leftovers(mark, before, known_pids, set(server_pids()) - set(servers))

    def collected_leftovers() -> list[str]:
        gc.collect()  # results of a launch hold a file open until they are collected
        return new_leftovers()

    if new_leftovers():
        left += settle(collected_leftovers, grace_s=GRACE_S)
    assert not left, "the test left behind:\n  " + "\n  ".join(left)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Seed Python, and numpy and torch where they are loaded already: asking for them here would load them."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def collects_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts collect garbage as Python does by default, at their exit too."""
    monkeypatch.delenv(COLLECT)


@pytest.fixture(scope="session")
def fonts_are_loaded() -> None:
    """matplotlib keeps the files of its fonts open: a test that draws uses this."""
    from matplotlib.figure import Figure

    figure = Figure()
    figure.add_subplot().set_title("text")
    figure.savefig(io.BytesIO())


def server_pids() -> tuple[int, ...]:
    """What stays alive on purpose between tests: warm rank servers, and what forks for the emulated accelerator."""
    client = sys.modules.get("ddpilot.launching.rank_server.client")
    on_device = sys.modules.get("tests.accelerator.on_device")
    return (*(client.server_pids() if client else ()), *(on_device.forker_pids() if on_device else ()))


def spared_pids() -> tuple[int, ...]:
    """Processes that are no leak: those of `server_pids`, and Python's own resource tracker."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    tracker_pid = tracker._resource_tracker._pid if tracker else None
    return (*server_pids(), *([tracker_pid] if tracker_pid else ()))


def stop_rank_servers() -> None:
    """Stop what `spared_pids` spared, so that the run can end with nothing left."""
    if client := sys.modules.get("ddpilot.launching.rank_server.client"):
        client.stop_servers()
    if on_device := sys.modules.get("tests.accelerator.on_device"):
        on_device.stop_forker()
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    if tracker and tracker._resource_tracker._pid:
        tracker._resource_tracker._stop()


def _new_leftovers(mark: str, before: Look, known_pids: set[int], new_servers: set[int]) -> list[str]:
    now = look(mark, spared_pids=spared_pids(), known_pids=known_pids)
    shared = now.shared_memory_files - before.shared_memory_files
    # Others use this machine's shared memory too; a file that a live process uses is no leftover of this test.
    theirs = shared - set(unused_shared_memory(shared)) if shared else frozenset()
    if "PYTEST_XDIST_WORKER" in os.environ:  # a semaphore names no owner: it may be that of tests in another process
        theirs |= {name for name in shared if name.startswith("sem.mp-")}
    left = [entry for entry in now.since(before) if entry.removeprefix("shared memory files: ") not in theirs]
    for channel in [entry for entry in left if re.match(r"file descriptors: \d+ -> socket:", entry)][
        : len(new_servers)
    ]:
        left.remove(channel)  # this process's end of the line to a server that the test started
    return left


def _long_lived(seen: Look) -> Look:
    # Descriptors and shared memory are compared after each test, where their owner is known.
    return Look(processes=seen.processes, threads=seen.threads, listening_ports=seen.listening_ports)


def _restore_environment(before: dict[str, str]) -> list[str]:
    own = {"PYTEST_CURRENT_TEST"}  # pytest changes it between set-up and teardown
    after = dict(os.environ)
    changed = [name for name in {*before, *after} - own if before.get(name) != after.get(name)]
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable: {name}={after.get(name)!r}, was {before.get(name)!r}" for name in sorted(changed)]


def _leave_process_group() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["process group: the default one was still up"]


@pytest.fixture
def compiler_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first optimizer of a process, or tensor on `meta`, imports torch's compiler, which sets this variable."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    importlib.import_module("torch._dynamo")
