# SPDX-License-Identifier: Apache-2.0
"""What ranks print, as the parent shows it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ddpilot import Launcher, RankError
from ddpilot.output import lines
from tests.dist.launching.scripts import run_script

NUM_MB = 200 if os.environ.get("DDPILOT_SOAK") == "1" else 20


def talk() -> None:
    """Print in every way that a rank has."""
    import ctypes
    import subprocess
    import warnings

    rank = os.environ["RANK"]
    print("the same")
    print(f"mine {rank}")
    print("to stderr", rank, file=sys.stderr)
    libc = ctypes.CDLL(None)
    libc.puts(f"from C {rank}".encode())
    os.write(1, f"raw {rank} ".encode() + b"\xff\xfe\n")
    subprocess.run(["echo", f"from a program {rank}"], check=True)
    warnings.warn(f"warned {rank}", stacklevel=1)
    print("no newline", rank, end="")


@pytest.fixture
def _patient_collapser(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, the same line of the other rank comes in time."""
    monkeypatch.setattr(lines, "WINDOW_S", 20.0)


@pytest.mark.usefixtures("_patient_collapser")
def test_launch_labels_and_collapses_what_ranks_print(capfd: pytest.CaptureFixture[str]) -> None:
    """ "Captured at file-descriptor level (C++ too), line by line, labelled; identical lines collapse"."""
    Launcher(nproc_per_node=2).run(talk)
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines.count("[ranks 0,1] the same") == 1
    for rank in range(2):
        own = [line.partition("] ")[2] for line in lines if line.startswith(f"[rank {rank}] ")]
        assert own == [
            f"mine {rank}",
            f"from C {rank}",
            f"raw {rank} \ufffd\ufffd",
            f"from a program {rank}",
            f"no newline {rank}",
        ]
        assert f"[rank {rank}] to stderr {rank}" in err
        assert f"UserWarning: warned {rank}" in err


def test_launch_shows_rank_zero_alone_or_nothing_when_asked(capfd: pytest.CaptureFixture[str]) -> None:
    """`output="rank_zero"` has no labels, `output="silent"` shows nothing; an error has its last lines all the same."""

    def fail() -> None:
        print("last", "words")
        raise ValueError("bad")

    Launcher(nproc_per_node=2, output="rank_zero").run(talk)
    out, err = capfd.readouterr()
    assert out.splitlines()[:3] == ["the same", "mine 0", "from C 0"]
    assert "mine 1" not in out
    assert "to stderr 1" not in err
    Launcher(nproc_per_node=2, output="silent").run(talk)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(RankError) as caught:
        Launcher(nproc_per_node=1, output="silent").run(fail)
    assert caught.value.last_lines == ("last words",)
    assert "Last output of rank 0:\n  last words" in str(caught.value)


@pytest.mark.usefixtures("_patient_collapser")
def test_launch_shows_progress_bars_of_rank_zero_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """ "Carriage-return progress bars show from rank 0 alone", and end as full bars on lines of their own."""

    def progress() -> None:
        import importlib

        tqdm = importlib.import_module("tqdm")  # it publishes no types
        for _ in tqdm.tqdm(range(20), desc=f"epoch of {os.environ['RANK']}", mininterval=0):
            time.sleep(0.001)
        print("after")

    Launcher(nproc_per_node=2).run(progress)
    out, err = capfd.readouterr()
    assert out == "[ranks 0,1] after\n"
    assert "epoch of 1" not in err
    final = err.rstrip("\n").split("\r")[-1]
    assert final.startswith("[rank 0] epoch of 0: 100%")
    assert err.endswith("\n")


def test_launch_shows_lines_while_the_ranks_still_run(tmp_path: Path) -> None:
    """Output comes as it is printed, not at the end: the rank waits for a sign that its line was seen."""

    class Watching:
        """A stdout that gives the sign."""

        def write(self, text: str) -> int:
            if "are you there?" in text:
                (tmp_path / "seen").touch()
            return len(text)

        def flush(self) -> None: ...

    def wait(sign: Path) -> bool:
        print("are you there?")
        end = time.monotonic() + 20
        while not sign.exists() and time.monotonic() < end:
            time.sleep(0.005)
        return sign.exists()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", Watching())
        assert Launcher(nproc_per_node=1).run(wait, tmp_path / "seen")[0]


def test_launch_survives_a_rank_that_closes_its_stdout() -> None:
    """The value comes back, from Python's stream as well as from the descriptor below it."""

    def close(how: str) -> str:
        if how == "stream":
            sys.stdout.close()
        else:
            os.close(1)
            os.close(2)
        return how

    assert list(Launcher(nproc_per_node=2).run(close, "stream")) == ["stream"] * 2
    assert list(Launcher(nproc_per_node=2).run(close, "descriptor")) == ["descriptor"] * 2


FLOOD = """
import os, resource, sys, threading, ddpilot
def flood(num_lines):
    line = os.environ["RANK"] + "x" * 998 + "\\n"
    for _ in range(num_lines):
        sys.stdout.write(line)
    os.write(1, b"y" * 300_000 + b"\\n")
before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ddpilot.launch(flood, int(sys.argv[1]), nproc_per_node=2)
sys.stderr.write(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb))
"""


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_launch_shows_all_of_a_flood_in_bounded_memory(tmp_path: Path) -> None:
    """Ranks that print megabytes lose no line and do not fill the parent; so too a line of 300 kB (200 MB in soak)."""
    num_lines = NUM_MB * 1000 // 2
    source = FLOOD.replace("sys.argv[1]", repr(str(num_lines)))
    outcome = run_script(source, tmp_path, limit_s=280)
    lines = outcome.out.splitlines()
    for rank in range(2):
        assert lines.count(f"[rank {rank}] {rank}{'x' * 998}") == num_lines
    assert sum(line.count("y") * (2 if line.startswith("[ranks 0,1]") else 1) for line in lines) == 600_000
    assert int(outcome.err) < 60_000, "kB more than before the launch"


def test_launch_takes_a_flood_of_short_equal_lines_in_seconds() -> None:
    """100,000 equal lines of every rank do not stall the launch."""

    def flood() -> None:
        os.write(1, b"x\n" * 100_000)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", open(os.devnull, "w"))
        Launcher(nproc_per_node=2, timeout_s=30).run(flood)
        sys.stdout.close()


def test_launch_counts_what_is_over_the_limit(capfd: pytest.CaptureFixture[str]) -> None:
    """`output_limit_bytes=` is per rank; the rest is counted, and the last lines are kept for an error."""

    def flood() -> None:
        for number in range(3000):
            print(f"{os.environ['RANK']} {number} {'x' * 1000}")
        raise ValueError("after the flood")

    with pytest.raises(RankError) as caught:
        Launcher(nproc_per_node=1, output_limit_bytes=10_000).run(flood)
    out, err = capfd.readouterr()
    assert 10_000 < len(out) < 200_000
    assert "MB more output of rank 0 not shown (limit 10000 bytes per rank, `output_limit_bytes=`)" in err
    assert caught.value.last_lines[-1].startswith("0 2999 x")


def test_launch_gives_an_empty_stdin() -> None:
    """A rank that asks for input gets the end of the file at once instead of waiting for ever."""

    def ask() -> Any:
        try:
            return input("name? ")
        except EOFError:
            return "nobody there"

    assert list(Launcher(nproc_per_node=2, timeout_s=20).run(ask)) == ["nobody there"] * 2
