# SPDX-License-Identifier: Apache-2.0
"""Parsing the words of `ddpilot run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ddpilot.cli.app import app
from ddpilot.cli.run_command import make_parser, read_options, split_words
from ddpilot.errors import LaunchError
from ddpilot.launching.elastic.options import RunOptions
from ddpilot.watch.options import WatchOptions


def read(line: str, **environ: str) -> RunOptions:
    """The options of a command line."""
    return read_options(split_words(line.split()), environ)[0]


def test_read_options_takes_every_option_of_torchrun() -> None:
    """Each sets its field, converted to the type of the field."""
    line = (
        "--nnodes 2:4 --nproc-per-node gpu --node-rank 1 --master-addr [::1] --master-port 29501 --max-restarts 3 "
        "--rdzv-backend c10d --rdzv-endpoint host:1 --rdzv-id job --rdzv-conf timeout=60,read_timeout=5 --role trainer "
        "--monitor-interval 0.5 --log-dir logs -r 0:1 -t 3 --local-ranks-filter 0,2 --local-addr me "
        "--signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 9 --node-timeout 7 -m pkg.train -x"
    )
    assert read(line) == RunOptions(
        target="pkg.train",
        kind="module",
        args=("-x",),
        nnodes=(2, 4),
        nproc_per_node="gpu",
        node_rank=1,
        master_addr="::1",
        master_port=29501,
        max_restarts=3,
        rdzv_backend="c10d",
        rdzv_endpoint="host:1",
        rdzv_id="job",
        rdzv_conf={"read_timeout": "5"},
        rdzv_timeout_s=60.0,
        role="trainer",
        monitor_interval_s=0.5,
        log_dir=Path("logs"),
        redirects="0:1",
        tee="3",
        shown_local_ranks=frozenset({0, 2}),
        local_addr="me",
        signals=("SIGTERM", "SIGUSR1"),
        shutdown_timeout_s=9.0,
        node_timeout_s=7.0,
    )


def test_read_options_reads_the_options_of_watching() -> None:
    """They are those of a session; `--stall-warn-s`, the session's spelling, is accepted too."""
    line = "train.py --no-watch --no-guard --on-finding report --stall-warn-s 7"
    _, watching = read_options(split_words(line.split()), {})
    assert watching == WatchOptions(watch=False, guard=False, on_finding="report", stall_warn_s=7.0)
    assert read_options(split_words(["train.py", "--watch"]), {})[1] == WatchOptions(on_finding="stop")


def test_read_options_reads_torchruns_variables_below_the_words() -> None:
    """PET_NPROC_PER_NODE and others, which job operators set; options on the command line take precedence."""
    options = read("train.py", PET_NPROC_PER_NODE="4", PET_MAX_RESTARTS="2", PET_STANDALONE="0")
    assert (options.nproc_per_node, options.max_restarts) == (4, 2)
    assert read("-n 2 train.py", PET_NPROC_PER_NODE="4").nproc_per_node == 2


def test_read_options_lets_standalone_win_as_torchrun_does() -> None:
    """The other rendezvous options are ignored then, and two nodes are a contradiction."""
    options = read("--standalone --rdzv-backend c10d --master-port 1 train.py")
    assert (options.rdzv_backend, options.master_port) == ("static", None)
    with pytest.raises(LaunchError, match="--standalone and --nnodes 2"):
        read("--standalone --nnodes 2 train.py")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-n x train.py", "reading --nproc-per-node: 'x'. Give a number of ranks from 1 to 1024, or auto"),
        ("train.py --on-finding maybe", "reading --on-finding: invalid choice: 'maybe'"),
        ("train.py --watch --no-watch", "reading --no-watch: not allowed with argument --watch"),
        ("train.py --stall-warn x", "reading --stall-warn: 'x' is not a number of seconds"),
        ("--nnodes x train.py", "reading --nnodes: 'x' is not a number of nodes"),
        ("-n 0 train.py", "reading --nproc-per-node: 0. Give a number of ranks from 1 to 1024"),
        ("--nnodes 1:2 train.py", "a range needs --rdzv-backend c10d"),
        ("--nnodes 2 --node-rank 2 train.py", "with --nnodes 2 the last is 1"),
        ("--max-restarts x train.py", "reading --max-restarts: 'x' is not a whole number"),
        ("--tee 9 train.py", "reading --tee: '9' is not 3 (both streams), 1 (stdout), 2 (stderr) or 0 (neither)"),
        ("--tee a:1 train.py", "reading --tee: 'a:1' is not 3"),
        (
            "--local-ranks-filter a train.py",
            "reading --local-ranks-filter: 'a' is not a list of local ranks",
        ),
        ("--max-restarts -1 train.py", "reading --max-restarts: -1"),
        ("--master-port 70000 train.py", "reading --master-port: 70000"),
        ("--node-timeout nan train.py", "reading --node-timeout: 'nan'"),
        ("--redirects 4 train.py", "reading --redirects: '4'"),
        ("--rdzv-conf timeout train.py", "reading --rdzv-conf: 'timeout'"),
        ("--rdzv-conf timeout=soon train.py", "reading --rdzv-timeout: 'soon' is not a number of seconds"),
        ("--signals-to-handle SIGKILL train.py", "reading --signals-to-handle: 'SIGKILL'"),
        ("-m --no-python train.py", "reading --no-python: not allowed with argument -m/--module"),
        ("-n", "reading --nproc-per-node: expected one argument"),
        ("train.py -n -- 4", "reading --nproc-per-node: expected one argument"),
        ("--standalone=yes train.py", "reading --standalone: ignored explicit argument 'yes'"),
        ("--standalone", "no script is given"),
    ],
)
def test_read_options_rejects_invalid_values(line: str, said: str) -> None:
    """The error names the option, its value and the accepted values."""
    with pytest.raises(LaunchError) as caught:
        read(line)
    assert said in str(caught.value)


@pytest.mark.parametrize(("words", "status"), [(["run", "--help"], 0), (["run", "-h"], 0), (["run"], 2)])
def test_run_help_has_every_option(words: list[str], status: int) -> None:
    """With and without -h."""
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == status
    assert all(flag in shown.output for flag in make_parser().flags)
    assert "ddpilot run train.py -n 4 -- --epochs 3" in shown.output


def test_run_passes_its_words_on_unchanged(tmp_path: Path, monkeypatch: Any) -> None:
    """typer neither drops a `--` nor reads an option of the script."""
    seen: list[Any] = []

    def note(words: list[str], *_: object) -> int:
        seen.append(words)
        return 0

    monkeypatch.setattr("ddpilot.cli.run_command.run_words", note)
    words = ["train.py", "-n", "2", "--", "--help", "--", "-n", "--version"]
    assert CliRunner().invoke(app, ["run", *words]).exit_code == 0
    assert seen == [words]


@pytest.mark.parametrize(
    ("line", "options", "args"),
    [
        ("train.py", {}, ""),
        ("train.py -n 4 -- --epochs 3", {"nproc_per_node": 4}, "--epochs 3"),
        ("train.py -- -n 4", {}, "-n 4"),
        ("train.py -n4 --standalone -- a -- b", {"nproc_per_node": 4, "standalone": True}, "a -- b"),
        ("train.py -n=4 -- a", {"nproc_per_node": 4}, "a"),
        ("--nproc-per-node 4 train.py --epochs 3", {"nproc_per_node": 4}, "--epochs 3"),
        ("--nproc_per_node=4 train.py -n 2 --log-dir x", {"nproc_per_node": 4}, "-n 2 --log-dir x"),
        ("--nproc_per_node=4 train.py -- --epochs 3", {"nproc_per_node": 4}, "--epochs 3"),
        ("--nproc_per_node=4 train.py a -- b", {"nproc_per_node": 4}, "a -- b"),
        ("--standalone -- train.py -n 2", {"standalone": True}, "-n 2"),
        (
            "--master_addr=::1 --rdzv_conf=a=b,c=d train.py",
            {"master_addr": "::1", "rdzv_conf": {"a": "b", "c": "d"}},
            "",
        ),
        ("-r3 -t 0:1,1:2 train.py -", {"redirects": "3", "tee": "0:1,1:2"}, "-"),
        ("--max-restarts 3 --monitor-interval=1 train.py", {"max_restarts": 3, "monitor_interval_s": 1.0}, ""),
        ("-m train.py --epochs 3", {"kind": "module"}, "--epochs 3"),
        ("train.py -m -- --epochs 3", {"kind": "module"}, "--epochs 3"),
    ],
)
def test_split_words_separates_options_from_the_scripts_words(line: str, options: dict[str, Any], args: str) -> None:
    """The script first or torchrun's order, dashes and underscores, a blank or an equals sign."""
    found = split_words(line.split())
    assert make_parser().read(found.options) == options
    assert (found.script, " ".join(found.args)) == ("train.py", args)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train.py --epochs 3", "Arguments of the script come after `--`: ddpilot run train.py -- --epochs 3"),
        ("train.py -n 2 data -- x", "come after `--`: ddpilot run train.py -n 2 -- data x"),
        (
            "torch.distributed.launch --nproc_per_node=2 train.py",
            "Leave out `torch.distributed.launch`: ddpilot run --nproc_per_node=2 train.py",
        ),
        (
            "python -m torch.distributed.run -n 2 train.py -- -x",
            "Leave out `python -m torch.distributed.run`: ddpilot run -n 2 train.py -x",
        ),
        ("python train.py", "Leave out `python`: ddpilot run train.py"),
        ("--nproc-per-nod 2 train.py", "Did you mean --nproc-per-node?"),
        ("--nproc 2 train.py", "The option is --nproc-per-node, or -n"),
        ("--use_env train.py", "torch.distributed.launch's; LOCAL_RANK is always in the environment: leave it out"),
        ("--local_rank=0 train.py", "the script reads os.environ['LOCAL_RANK']"),
        ("--start-method fork train.py", "--start-method is not supported"),
        ("--numa-binding node train.py", "start it under numactl"),
        ("-q train.py", "-q is not an option of `ddpilot run`"),
    ],
)
def test_split_words_shows_the_correct_command_line(line: str, said: str) -> None:
    """No word is ignored: the error has what to write instead."""
    with pytest.raises(LaunchError) as caught:
        split_words(line.split())
    assert said in str(caught.value)
