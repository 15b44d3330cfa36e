# SPDX-License-Identifier: Apache-2.0
"""The fixtures that fail a leaking test do fail it, and name what it left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.leftovers import LEAK_PREFIX, LEAK_VARIABLE, MARK, Look, marked_pids

ROOT = Path(__file__).parents[1]
SHARED = Path(f"/dev/shm/{LEAK_PREFIX}{os.getpid()}")

# What a test does, and the line that its failure must print (`*` matches anything).
LEAKS = {
    "import os; os.environ['LEAKED'] = 'yes'": "environment variable: LEAKED='yes', was None",
    "import subprocess as s; kept.append(s.Popen(['sleep', '2.01']))": "processes: * (S) sleep 2.01",
    "import os; os.system('setsid sleep 2.02 &')": "processes: * (S) sleep 2.02",
    "import os; os.posix_spawn('/bin/true', ['true'], {})": "processes: * (Z) no command: a zombie",
    "import threading as t, time; t.Thread(target=time.sleep, args=(2,), name='ghost').start()": "threads: ghost *",
    "kept.append(open('/dev/null'))": "file descriptors: * -> /dev/null",
    "import socket; kept.append(socket.create_server(('127.0.0.1', 0)))": "listening ports: 127.0.0.1 port *",
    f"open({str(SHARED)!r}, 'w').close()": f"shared memory files: {SHARED.name}",
    "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)": (
        "process group: the default one was still up"
    ),
}


@pytest.fixture
def _no_shared_memory_left() -> Iterator[None]:
    yield
    SHARED.unlink(missing_ok=True)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("_no_shared_memory_left")
def test_no_leaks_fails_a_test_for_every_kind_of_leftover(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One leaking test per kind fails in its teardown with kind and culprit; a clean test passes; the run fails too."""
    monkeypatch.setenv(LEAK_VARIABLE, SHARED.name)
    ours = (ROOT / "tests/conftest.py").read_text()
    short = ours.replace("GRACE_S = 2.0", "GRACE_S = 0.1").replace('pytest_plugins = ["pytester"]', "")
    pytester.makeconftest(short)
    tests = "".join(f"def test_{number}():\n    {code}\n" for number, code in enumerate(LEAKS))
    pytester.makepyfile(f"kept = []\n{tests}def test_clean():\n    pass\n")
    pytester.makeini(f"[pytest]\npythonpath = {ROOT}\n")
    outcome = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=50)
    outcome.stdout.fnmatch_lines_random([f"*{line}*" for line in LEAKS.values()])
    outcome.stdout.fnmatch_lines(["*after the whole run and after stopping the rank servers, these were left:*"])
    outcome.assert_outcomes(passed=len(LEAKS) + 1, errors=len(LEAKS) + 1)


def test_a_process_that_ran_and_now_sleeps_is_the_same() -> None:
    """Only its state differs between two looks; another one, of another number, is left over."""
    before = Look(processes=frozenset({"7 (R) python kernel"}))
    after = Look(processes=frozenset({"7 (S) python kernel", "71 (S) python kernel"}))
    assert after.since(before) == ["processes: 71 (S) python kernel"]


def test_marked_pids_sees_a_process_while_it_is_replacing_its_program(tmp_path: Path) -> None:
    """A process that does nothing but `exec` is among the marked ones at each of 200 looks."""
    script = tmp_path / "again.sh"
    script.write_text('exec sh "$0"\n')
    with subprocess.Popen(["sh", script], env={**os.environ, MARK: "again"}) as process:
        try:
            seen = [marked_pids("again") for _ in range(200)]
        finally:
            process.kill()
    assert seen == [{process.pid}] * 200
