# SPDX-License-Identifier: Apache-2.0
"""Options of a job: which values are refused, by which name, and where defaults come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpilot.cli.slurm_command import read_words, run_words
from ddpilot.errors import SlurmError
from ddpilot.slurm.options import JobOptions, make_options, options_with_defaults


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nodes", 0),
        ("nodes", "two"),
        ("nproc_per_node", -1),
        ("cpus_per_task", True),
        ("time", "2h"),
        ("time", "1:2"),
        ("gpus_per_node", "four"),
        ("gres", "gpu 4"),
        ("mem", "64 GB"),
        ("mem_per_cpu", "-1"),
        ("signal", "USR3@60"),
        ("signal", "USR1@soon"),
        ("array", "1-"),
        ("dependency", "after 12"),
        ("mail_type", "ALWAYS"),
        ("job_name", "a b"),
        ("exclusive", "yes"),
        ("launcher", "mpirun"),
        ("account", "a\nb"),
        ("partition", ""),
        ("modules", ("cuda\nrm",)),
        ("env", {"A B": "1"}),
        ("extra", {"gpu_per_node": "4"}),
        ("extra", {"nodse": "2"}),
        ("extra", {"tiem": "10"}),
        ("extra", {"wrap": "ls"}),
        ("extra", {"ntasks": "4"}),
    ],
)
def test_options_refuse_a_wrong_value_by_name(name: str, value: Any) -> None:
    """The error has the field's name, also as an attribute; of `extra`, the name of its key."""
    with pytest.raises(SlurmError) as caught:
        JobOptions(**{name: value})
    wanted = next(iter(value)) if name == "extra" else name
    assert caught.value.field == wanted
    assert f"`{wanted}`" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time", "90"),
        ("time", "2:00:00"),
        ("time", "1-12"),
        ("time", "1-12:30:00"),
        ("time", "UNLIMITED"),
        ("gpus_per_node", "a100:4"),
        ("gres", "gpu:a100:4,nvme:1"),
        ("mem", "0"),
        ("mem", "1.5T"),
        ("signal", "USR1@120"),
        ("signal", "B:SIGTERM"),
        ("signal", "10@60"),
        ("array", "1,3,5-9:2%2"),
        ("dependency", "afterok:1:2,afterany:3_4"),
        ("dependency", "singleton"),
        ("exclusive", "user"),
        ("extra", {"nice": "10", "spread_job": True, "container_id": "7"}),
    ],
)
def test_options_accept_what_sbatch_accepts(name: str, value: Any) -> None:
    """The spellings of its manual."""
    assert getattr(JobOptions(**{name: value}), name) == value


def test_options_refuse_two_fields_for_the_same_thing() -> None:
    """Such as memory of a node and of a core."""
    with pytest.raises(SlurmError, match="`mem_per_cpu` is '1G', with `mem`"):
        JobOptions(mem="4G", mem_per_cpu="1G")


@pytest.mark.parametrize(
    ("values", "field", "said"),
    [
        ({"signal": "KILL@10"}, "signal", "saves at USR1 or TERM"),
        ({"signal": "B:USR1@120"}, "signal", "reaches the job script and not its ranks"),
        ({"no_requeue": True}, "no_requeue", "does not resume"),
        ({"open_mode": "truncate"}, "open_mode", "is appended"),
    ],
)
def test_options_refuse_what_would_end_a_requeued_job(values: dict[str, Any], field: str, said: str) -> None:
    """It would end without a checkpoint, or not be requeued; without `requeue` all of it is fine."""
    with pytest.raises(SlurmError, match=said) as caught:
        make_options({**values, "requeue": True})
    assert caught.value.field == field
    make_options(values)
    make_options({"signal": "TERM@60", "open_mode": "append", "requeue": True})


def test_options_refuse_torchrun_with_requeue() -> None:
    """It hides the exit code that asks for it."""
    with pytest.raises(SlurmError, match="torchrun turns the exit code 75 of its ranks into 1"):
        JobOptions(launcher="torchrun", requeue=True)


def test_options_pass_unknown_fields_through() -> None:
    """They become options of sbatch of that name."""
    assert make_options({"licenses": "a:1", "mem": 0, "nice": 5}) == JobOptions(
        mem="0", extra={"licenses": "a:1", "nice": "5"}
    )


def test_defaults_of_the_nearest_file_count_and_arguments_override_them(tmp_path: Path) -> None:
    """A default for memory of a node gives way to an argument for memory of a core."""
    inner = tmp_path / "project" / "runs"
    inner.mkdir(parents=True)
    (tmp_path / ".ddpilot.toml").write_text('[slurm]\naccount = "site"\n')
    (tmp_path / "project" / "pyproject.toml").write_text(
        '[tool.ddpilot.slurm]\naccount = "mine"\nmem = "64G"\nmodules = ["cuda"]\ncpus-per-task = 4\nlicenses = "x"\n'
    )
    found = options_with_defaults({"mem_per_cpu": "2G"}, inner, tmp_path)
    assert found == JobOptions(
        account="mine", mem_per_cpu="2G", modules=("cuda",), cpus_per_task=4, extra={"licenses": "x"}
    )
    assert options_with_defaults({}, tmp_path, tmp_path).account == "site"


def test_defaults_that_are_wrong_are_refused_with_their_file(tmp_path: Path) -> None:
    """Before anything is submitted."""
    (tmp_path / ".ddpilot.toml").write_text('[slurm]\ntime = "soon"\n')
    with pytest.raises(SlurmError, match=r"reading the defaults of jobs in .*\.ddpilot\.toml: `time` is 'soon'"):
        options_with_defaults({}, tmp_path, tmp_path)
    (tmp_path / ".ddpilot.toml").write_text("[slurm\n")
    with pytest.raises(SlurmError, match=r"reading .*\.ddpilot\.toml: "):
        options_with_defaults({}, tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("mem = true", "mem"),
        ('env = "A=1"', "env"),
        ("env = { A = true }", "env"),
        ('requeue = "no"', "requeue"),
        ('uv = "yes"', "uv"),
        ("modules = 3", "modules"),
        ('constraint = ["a"]', "constraint"),
        ("extra = 3", "extra"),
        ("foo = { a = 1 }", "foo"),
    ],
)
def test_defaults_of_a_wrong_type_are_refused_by_name(tmp_path: Path, line: str, name: str) -> None:
    """TOML has types of its own, of which a job script would get the text."""
    (tmp_path / ".ddpilot.toml").write_text(f"[slurm]\n{line}\n")
    with pytest.raises(SlurmError, match=rf"`{name}` is ") as caught:
        options_with_defaults({}, tmp_path, tmp_path)
    assert caught.value.field == name


def test_defaults_may_be_written_as_toml_has_them(tmp_path: Path) -> None:
    """Numbers, a time of day, names with blanks or commas between them, and one line of set-up."""
    lines = ["time = 02:00:00", "account = 12", 'modules = "cuda/12,gcc nccl"', 'setup = "ulimit -n 4096"']
    (tmp_path / ".ddpilot.toml").write_text("\n".join(["[slurm]", *lines, "env = { A = 1 }", "nice = 5"]))
    found = options_with_defaults({}, tmp_path, tmp_path)
    assert (found.time, found.account, found.modules) == ("02:00:00", "12", ("cuda/12", "gcc", "nccl"))
    assert (found.setup, found.env, found.extra) == (("ulimit -n 4096",), {"A": "1"}, {"nice": "5"})


def test_an_option_whose_value_stands_apart_is_named() -> None:
    """With both ways to give it: to the script, or to sbatch."""
    with pytest.raises(SlurmError, match=r"`--epochs 3`: --epochs is not an option here") as caught:
        read_words(["train.py", "--epochs", "3"])
    assert "after `--`" in str(caught.value)
    assert "--epochs=3" in str(caught.value)
    with pytest.raises(SlurmError, match="`other.py` is neither the script nor an option's value"):
        read_words(["train.py", "other.py"])


def test_a_misspelled_verb_has_a_proposal() -> None:
    """Before its number is read as an argument."""
    with pytest.raises(SlurmError, match=r"'folow' is not one of follow, status, cancel. Did you mean `follow`\?"):
        run_words(["folow", "12_3"])


def test_what_to_give_instead_is_said_however_an_option_of_sbatch_is_written() -> None:
    """`--gpus 4` is not advised to be written as --gpus=4, which is refused as well."""
    with pytest.raises(SlurmError, match="comes after `--`; the field is gpus_per_node"):
        read_words(["train.py", "--gpus", "4"])
