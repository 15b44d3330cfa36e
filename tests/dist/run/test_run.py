# SPDX-License-Identifier: Apache-2.0
"""`ddpilot run` on one node: training, options, files, ports."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from tests.dist.launching.scripts import finish
from tests.dist.run.commands import RUN, run, started, write
from tests.ports import kept_port
from tests.soak import soak

EXAMPLE = Path(__file__).parents[3] / "examples" / "raw_ddp.py"
REDUCE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), sys.argv[1:])
dist.destroy_process_group()
"""


@soak
@pytest.mark.timeout(180)
def test_run_trains_as_plain_python_does(tmp_path: Path) -> None:
    """The words of the guide: the curve of two ranks, printed by rank, is that of one process."""
    with started([sys.executable, EXAMPLE, "--epochs", 1], tmp_path) as alone:
        done, plain = run(tmp_path, EXAMPLE, "-n", 2, "--", "--epochs", 1), finish(alone, 150)
    assert done.code == plain.code == 0, done.err
    ours, theirs = (re.search(r"epoch 1/1: loss ([\d.]+)", text) for text in (done.out, plain.out))
    assert ours is not None
    assert theirs is not None
    assert float(ours[1]) == pytest.approx(float(theirs[1]), abs=1e-3)
    assert done.out.startswith("[rank 0] epoch 1/1")
    assert "2 rank(s) on cpu" in done.out


@pytest.mark.timeout(120)
def test_run_meets_by_c10d_when_it_is_asked_to(tmp_path: Path) -> None:
    """Two agents on this machine, by a rendezvous of torch's, form one world of two."""
    write(tmp_path, "train.py", REDUCE)
    with kept_port() as port:
        words = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv_endpoint=localhost:{port}"]
        with (
            started([*RUN, *words, "--rdzv-id=job", "train.py", "-x"], tmp_path) as one,
            started([*RUN, *words, "--rdzv-id=job", "train.py", "-x"], tmp_path) as other,
        ):
            ends = [finish(one), finish(other)]
    assert [done.code for done in ends] == [0, 0], ends
    assert sorted(done.out for done in ends) == ["[rank 0] sum 2 ['-x']\n", "[rank 1] sum 2 ['-x']\n"]


@pytest.mark.timeout(120)
def test_run_says_that_nodes_are_missing_where_torchs_rendezvous_has_no_words(tmp_path: Path) -> None:
    """The error that torch raises is empty."""
    write(tmp_path, "train.py", REDUCE)
    with kept_port() as port:
        words = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv_endpoint=localhost:{port}"]
        with started([*RUN, *words, "--rdzv-id=job", "--rdzv-conf=join_timeout=2", "train.py"], tmp_path) as one:
            done = finish(one)
    assert done.code == 1
    assert "not all of 2 nodes joined in time" in done.err
    assert "every node was started with the same --rdzv-id and --nnodes" in " ".join(done.err.split())


@pytest.mark.timeout(120)
def test_run_writes_what_it_is_asked_to_write(tmp_path: Path) -> None:
    """--redirects keeps a stream off the screen, --tee shows it too, the filter hides a rank, files have the bytes."""
    write(tmp_path, "train.py", "import sys\nprint('out')\nprint('err', file=sys.stderr)\n")
    words = ["--log-dir", "logs", "--redirects", "1", "-t2", "--local-ranks-filter", "1"]
    done = run(tmp_path, "-n", 2, *words, "train.py")
    assert done.code == 0
    assert done.out == ""
    assert [line for line in done.err.splitlines() if "err" in line] == ["[rank 1] err"]
    written = {str(path.relative_to(path.parents[2])): path.read_text() for path in tmp_path.glob("logs/*/*/*/*.log")}
    assert written == {
        f"attempt_0/{rank}/{stream}.log": text
        for rank in (0, 1)
        for stream, text in (("stdout", "out\n"), ("stderr", "err\n"))
    }


@pytest.mark.timeout(60)
def test_run_names_the_holder_of_a_port(tmp_path: Path) -> None:
    """In under two seconds of its own and without torch: pid and command of the process that listens there."""
    write(tmp_path, "train.py", "")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with started([*RUN, "-n", 2, "--master-port", port, "train.py"], tmp_path) as process:
            done = finish(process, 30)
        assert done.code == 2
        assert done.err.startswith(
            f"error: opening port {port} for the store\n  found: the port is taken by pid {os.getpid()}: "
        )
        assert done.err.endswith(f"  fix:   Stop that process, or choose a --master-port other than {port}\n")


@pytest.mark.timeout(60)
def test_run_says_what_is_wrong_with_a_script_without_loading_torch(tmp_path: Path) -> None:
    """File, line and caret of a syntax error come from the command itself, before any rank."""
    write(tmp_path, "train.py", "x = 1\nif x\n    print(x)\n")
    code = (
        "import sys; sys.argv = ['ddpilot', 'run', 'train.py', '-n', '2']\n"
        "from ddpilot.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    with started([sys.executable, "-c", code], tmp_path) as process:
        done = finish(process, 30)
    assert done.out == "2 False\n"
    assert done.err == (
        "error: starting `train.py`\n  found: Python cannot read it\n"
        "  File \"train.py\", line 2\n    if x\n        ^\nSyntaxError: expected ':'\n"
        "  fix:   Correct that line\n"
    )
