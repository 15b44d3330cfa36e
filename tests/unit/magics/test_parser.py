# SPDX-License-Identifier: Apache-2.0
"""Parsing lines: ranks, variables, wrong options."""

from __future__ import annotations

import argparse
import dataclasses
import re

import pytest

from ddpilot.errors import LaunchError
from ddpilot.magics.parser import (
    VERBS,
    MagicParser,
    MagicUsageError,
    add_options,
    describe_options,
    parse_rank,
    parse_ranks,
    parse_variable,
    to_arguments,
)
from ddpilot.option_parser import HelpRequested
from ddpilot.session.options import SessionOptions


@pytest.mark.parametrize(
    ("text", "ranks"), [("0", (0,)), ("0,2-3", (0, 2, 3)), ("3,1,1", (1, 3)), ("0-0", (0,)), ("1, 2", (1, 2))]
)
def test_parse_ranks_reads_numbers_and_ranges(text: str, ranks: tuple[int, ...]) -> None:
    """Sorted, each once."""
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "0,", "1-x", "1.5"])
def test_parse_ranks_rejects_text_that_is_not_a_list(text: str) -> None:
    """The error contains the text."""
    with pytest.raises(argparse.ArgumentTypeError, match="is not a list of ranks such as 0,2-3"):
        parse_ranks(text)


def test_parse_rank_and_parse_variable_reject_invalid_text() -> None:
    """One rank is a number; a variable has a name and a value, which may contain =."""
    assert parse_rank("2") == 2
    assert parse_variable("A=b=c") == ("A", "b=c")
    with pytest.raises(argparse.ArgumentTypeError, match="'0,1' is not the number of a rank"):
        parse_rank("0,1")
    for wrong in ("A", "=b"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=value"):
            parse_variable(wrong)


def test_parser_raises_where_argparse_would_end_the_process() -> None:
    """The error has the usage; -h raises HelpRequested."""
    parser = MagicParser("%ddp pull", description="Copy.")
    parser.add_argument("--rank", type=parse_rank, metavar="R")
    with pytest.raises(MagicUsageError) as caught:
        parser.read(["--rank", "x"])
    assert str(caught.value) == (
        "reading `%ddp pull`: argument --rank: 'x' is not the number of a rank. Usage: %ddp pull [-h] [--rank R]"
    )
    assert caught.value._render_traceback_() == [f"UsageError: {caught.value}"]
    with pytest.raises(HelpRequested, match="(?s)usage: %ddp pull.*Copy.*--rank R"):
        parser.read(["-h"])
    assert parser.read([]) == {}


def test_parser_does_not_accept_abbreviated_options() -> None:
    """`--rank` for `--ranks` would become ambiguous if an option is added."""
    parser = MagicParser("%%ddp")
    parser.add_argument("--ranks")
    with pytest.raises(MagicUsageError, match="`--rank 0`. Did you mean `--ranks`"):
        parser.read(["--rank", "0"])


@pytest.mark.parametrize("typed", ["--nproc 2", "--nproc_per_node=2", "--nprocs=2", "--num-processes 2", "--ngpus 2"])
def test_verbs_suggest_n_for_other_names_of_the_number_of_ranks(typed: str) -> None:
    """Those of torchrun, Accelerate and others; `--nproc` is the beginning of the long form."""
    for verb, before in (("start", []), ("verify", ["train"])):
        with pytest.raises(MagicUsageError, match="Did you mean `-n/--nproc-per-node`"):
            VERBS[verb].parser().read([*before, *typed.split()])


LINE = (
    "-n 2 --gpus 0,1 --backend gloo --seed 7 --app fastai --app mine --env A=1 --env B=x=y --preload numpy --respawn "
    "--keep-cache --verbose --output rank_zero --output-limit-bytes 5 --no-watch --no-guard --on-finding stop "
    "--stall-warn-s 7"
)


SLURM_LINE = "--slurm --nodes 2 --gpus-per-node 4 --slurm-option time=2:00:00 --slurm-option exclusive"
HOSTS_LINE = "--hosts a,b"


def read(line: str) -> dict[str, object]:
    """The arguments in a line."""
    parser = MagicParser("%ddp start")
    add_options(parser)
    return to_arguments(parser.read(line.split()))


def test_options_read_every_field_of_a_session() -> None:
    """A new field needs an option."""
    arguments = read(LINE)
    given = {*arguments, *read(SLURM_LINE), *read(HOSTS_LINE)}
    assert given == {field.name for field in dataclasses.fields(SessionOptions)}
    assert SessionOptions(**arguments) == SessionOptions(  # type: ignore[arg-type]
        nproc_per_node=2,
        gpus=(0, 1),
        backend="gloo",
        seed=7,
        apps=("fastai", "mine"),
        env={"A": "1", "B": "x=y"},
        preload=("numpy",),
        respawn=True,
        keep_cache=True,
        verbose=True,
        output="rank_zero",
        output_limit_bytes=5,
        watch=False,
        guard=False,
        on_finding="stop",
        stall_warn_s=7.0,
    )


def test_options_of_other_machines() -> None:
    """Names of hosts, and what Slurm is asked for."""
    assert read(HOSTS_LINE) == {"hosts": ("a", "b")}
    assert read(SLURM_LINE) == {
        "slurm": True,
        "nodes": 2,
        "gpus_per_node": 4,
        "slurm_options": {"time": "2:00:00", "exclusive": ""},
    }


def test_options_that_are_not_given_are_left_to_the_session() -> None:
    """Defaults are declared in one place."""
    assert read("") == {}
    assert read("-n auto") == {"nproc_per_node": "auto"}


def test_options_are_checked_by_the_session() -> None:
    """The magic does not validate values itself."""
    with pytest.raises(LaunchError, match=r"reading `nproc_per_node`: 'some'\. Give a number of ranks"):
        SessionOptions(**read("-n some"))  # type: ignore[arg-type]


def test_options_have_help() -> None:
    """Each option has a line of help, `--no-watch` and `--no-guard` what they turn off, and no line is about Python."""
    with pytest.raises(HelpRequested) as helped:
        read("-h")
    text = " ".join(str(helped.value).split())
    assert text.count("--") >= 2 * len(dataclasses.fields(SessionOptions))
    assert "--no-watch do not record collectives" in text
    assert "--no-guard do not check for training" in text
    assert not re.search(r"None|\(\)|True|False|`|function|Launcher", text)


@pytest.mark.parametrize("line", ["", LINE, SLURM_LINE, HOSTS_LINE, "-n 4", "--gpus 0,2", "--env A=1"])
def test_describe_options_returns_an_equivalent_line(line: str) -> None:
    """Parsing it returns the same options."""
    options = SessionOptions(**read(line))  # type: ignore[arg-type]
    said = describe_options(options)
    assert said.startswith("%ddp start")
    assert SessionOptions(**read(said.removeprefix("%ddp start"))) == options  # type: ignore[arg-type]
