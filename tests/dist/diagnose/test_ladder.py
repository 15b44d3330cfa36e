# SPDX-License-Identifier: Apache-2.0
"""The doctor of a program on real ranks: a right one passes all rungs, others fail at theirs with name and line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddpilot.diagnose import doctor as machine
from ddpilot.diagnose.ladder.ladder import check_program
from ddpilot.diagnose.ladder.result import RUNGS
from ddpilot.diagnose.ranks import examine_rank
from ddpilot.errors import LaunchError
from tests.dist.diagnose import ladder_programs as programs
from tests.dist.diagnose import verify_programs
from tests.dist.in_process import Run, run_command
from tests.soak import soak

__all__ = ["run_command"]

pytestmark = pytest.mark.timeout(170)


def write(folder: Path, text: str) -> Path:
    """The script train.py in `folder`."""
    path = folder / "train.py"
    path.write_text(text)
    return path


WORDS = ("doctor", "train.py", "-n", "2", "--workers", "0", "--json")


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program is checked in the folder in which it is."""
    monkeypatch.chdir(tmp_path)


def check(folder: Path, text: str, num_updates: int = 3) -> dict[str, Any]:
    """What is found about the script, by this process, whose rank server is warm; the command's exit status is 1."""
    path = write(folder, text)
    found = check_program(path.name, nproc_per_node=2, num_updates=num_updates, num_workers=0)
    assert found.exit_status == 1, found.render()
    return found.to_dict()


def statuses(found: Mapping[str, Any]) -> str:
    """Letters of the rungs that are ok, then the one that is wrong in capitals."""
    marks: dict[str, Callable[[str], str]] = {
        "ok": lambda letter: letter,
        "wrong": lambda letter: letter.upper(),
        "not reached": lambda _: "",
    }
    return "".join(marks[rung["status"]](rung["rung"]) for rung in found["rungs"])


def finding_in(found: Mapping[str, Any]) -> dict[str, Any]:
    """The first finding of the rung that is wrong."""
    (rung,) = [each for each in found["rungs"] if each["status"] == "wrong"]
    first: dict[str, Any] = rung["findings"][0]
    return first


def point_in(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One point of the checklist."""
    (point,) = [each for each in found["checklist"] if each["item"] == name]
    return dict(point)


def items(found: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Status and evidence of each point, by its name."""
    return {each["item"]: (each["status"], each["evidence"]) for each in found["checklist"]}


def test_a_right_script_passes_all_rungs_and_no_run_is_made_twice(tmp_path: Path) -> None:
    """Its own words reach it; exit status 0; no point is wrong; four runs and one group of the machine's doctor."""
    write(tmp_path, programs.RIGHT)
    command = [sys.executable, "-m", "ddpilot", *WORDS, "--updates", "3", "--", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=160, check=False)
    assert done.stdout, done.stderr
    found, shown = json.loads(done.stdout), done.stderr
    assert done.returncode == 0, found
    assert [rung["status"] for rung in found["rungs"]] == ["ok"] * len(RUNGS)
    by_letter = {rung["rung"]: rung["evidence"] for rung in found["rungs"]}
    assert by_letter["a"].startswith("3 updates on cpu; loss ")
    assert by_letter["b"].startswith("Alone: no launcher gave this process a rank; python ")
    assert by_letter["c"].startswith("2 ranks joined in ")
    assert by_letter["d"] == "4 parameters, 1 buffer, 1 input, 1 target: on cpu"
    assert by_letter["e"] == ("gradients of 4 parameters are the same on ranks 0,1, of 8 and 8 samples, all different")
    assert by_letter["f"].startswith("3 updates of 1 and 2 ranks are ")
    assert " of an update: " in by_letter["g"]
    points = items(found)
    assert points["ranks form one group"] == ("ok", "2 ranks over gloo")
    assert points["other order in each epoch"] == ("ok", "set_epoch was called")
    assert points["process group destroyed"] == ("ok", "dist.destroy_process_group()")
    assert points["names without a prefix"][0] == "ok"
    assert points["mixed precision"] == ("not seen", "")
    assert not [name for name, (state, _) in points.items() if state == "wrong"]
    assert sum(line.startswith("run ") for line in shown.splitlines()) == 4
    assert not (tmp_path / "model.pt").exists()


def test_a_program_that_fails_as_one_process_fails_at_a(tmp_path: Path) -> None:
    """With its own error and line; nothing else is started."""
    found = check(tmp_path, programs.FAILS_AS_ONE_PROCESS)
    assert statuses(found) == "A"
    finding = finding_in(found)
    assert finding["code"] == "DDP830"
    assert finding["summary"] == "the run on 1 rank failed: rank 0 raised ValueError: bad sample"
    assert finding["place"]["text"] == "raise ValueError('bad sample')"


def test_a_program_without_updates_fails_at_a(tmp_path: Path) -> None:
    """There is nothing to check."""
    found = check(tmp_path, "import torch\nprint(torch.zeros(1))\n")
    assert statuses(found) == "A"
    assert finding_in(found)["summary"] == "on 1 rank no optimizer made a step"


def test_a_wrong_environment_fails_at_b(tmp_path: Path, run_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that does not exist."""
    write(tmp_path, programs.RIGHT)
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    done = run_command(*WORDS, "--updates", 1)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert [rung["status"] for rung in found["rungs"][:3]] == ["ok", "wrong", "not reached"]
    (finding,) = found["rungs"][1]["findings"]
    assert finding["code"] == "DDP104"
    assert "no-such-host.invalid" in finding["summary"]


def adds_on_rank_1_only() -> Any:
    """A rank whose all_reduce adds one too many."""
    original = dist.all_reduce

    def wrong(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(tensor, *args, **kwargs)
        tensor += dist.get_rank()
        return work

    dist.all_reduce = wrong
    return examine_rank(10.0)


def test_wrong_values_fail_at_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank with the wrong sum is named."""
    monkeypatch.setattr(machine, "_examine", adds_on_rank_1_only)
    found = check_program(verify_programs.with_adam, nproc_per_node=2, num_updates=1, num_workers=0).to_dict()
    assert statuses(found) == "abC"
    finding = finding_in(found)
    assert finding["code"] == "DDP808"
    assert "rank 1: all_reduce of 1 numbers: 4, not 3" in finding["evidence"]


def test_a_tensor_on_a_different_device_fails_at_d(tmp_path: Path) -> None:
    """It is named in full, with the line that calls the model."""
    found = check(tmp_path, programs.MASK_ELSEWHERE, 1)
    assert statuses(found) == "abcD"
    finding = finding_in(found)
    assert finding["code"] == "DDP412"
    assert finding["evidence"] == ["attribute `model.mask` is on meta in ranks 0,1, where cpu computes"]
    assert finding["place"]["text"] == "loss = F.cross_entropy(model(x), y)"


def test_the_same_data_on_all_ranks_fail_at_e(tmp_path: Path) -> None:
    """No DistributedSampler; the checklist has the line of the loader."""
    found = check(tmp_path, programs.NO_SAMPLER)
    assert statuses(found) == "abcdE"
    assert finding_in(found)["code"] == "DDP401"
    point = point_in(found, "divided among the ranks")
    assert (point["status"], point["code"]) == ("wrong", "DDP401")
    assert point["place"]["line"] > 1


@soak
def test_gradients_that_nobody_exchanges_fail_at_e(tmp_path: Path) -> None:
    """No DistributedDataParallel; the parameters are named."""
    found = check(tmp_path, programs.NOT_WRAPPED)
    assert statuses(found) == "abcdE"
    assert finding_in(found)["code"] == "DDP324"
    point = point_in(found, "gradients are exchanged")
    assert (point["status"], point["code"]) == ("wrong", "DDP324")
    assert point["place"]["line"] > 1


def test_a_rank_that_raises_before_its_backward_fails_at_e(tmp_path: Path) -> None:
    """With several ranks only."""
    found = check(tmp_path, programs.RANK_1_RAISES)
    assert statuses(found) == "abcdE"
    finding = finding_in(found)
    assert "rank 1 raised ValueError: bad sample" in finding["summary"]
    assert finding["place"]["text"] == "raise ValueError('bad sample')"


def test_a_collective_on_one_rank_stops_the_ladder_with_its_line(tmp_path: Path) -> None:
    """Found by watch while the ranks wait; lint names the same line in the checklist."""
    found = check(tmp_path, programs.RANK_0_WAITS)
    assert statuses(found) in ("abcdE", "abcdeF")
    assert finding_in(found)["severity"] == "error"
    point = point_in(found, "same collectives on all ranks")
    assert point["status"] == "wrong"
    assert point["place"]["line"] > 1


def test_other_numbers_than_one_process_fail_at_f(tmp_path: Path) -> None:
    """A loss times the number of ranks."""
    found = check(tmp_path, programs.SCALED_LOSS)
    assert statuses(found) == "abcdeF", found
    assert finding_in(found)["code"] == "DDP823"
    assert "every gradient on 2 ranks is 2 times that of one rank" in found["rungs"][5]["evidence"]


def test_a_slow_exchange_fails_at_g(tmp_path: Path) -> None:
    """A link on which gradients take 0.3 s: nearly all of an update."""
    found = check(tmp_path, programs.SLOW_LINK)
    assert statuses(found) == "abcdefG", found
    assert finding_in(found)["code"] == "DDP504"


def test_the_checklist_has_what_the_first_updates_do_not_reach(tmp_path: Path) -> None:
    """All rungs are ok; no set_epoch, no destroy, all ranks save, names with a prefix: each with its line."""
    found = check(tmp_path, programs.UNTIDY, 2)
    assert statuses(found) == "abcdefg"
    lines = programs.UNTIDY.splitlines()
    wrong = {each["item"]: each for each in found["checklist"] if each["status"] == "wrong"}
    codes = {name: each["code"] for name, each in wrong.items()}
    assert codes == {
        "other order in each epoch": "DDP402",
        "one rank writes a file": "DDP603",
        "names without a prefix": "DDP602",
        "process group destroyed": "DDP605",
    }
    save = '    torch.save(model.state_dict(), "model.pt")'
    assert lines[wrong["names without a prefix"]["place"]["line"] - 1] == save
    assert lines[wrong["one rank writes a file"]["place"]["line"] - 1] == save
    assert "init_process_group" in lines[wrong["process group destroyed"]["place"]["line"] - 1]


def test_a_function_is_checked_as_a_script_is() -> None:
    """A program of ddpilot's Loop, whose batches are global."""
    found = check_program(verify_programs.with_loop, nproc_per_node=2, num_updates=2, num_workers=0)
    assert statuses(found.to_dict()) == "abcdefg", found.render()
    assert found.failed is None


@pytest.mark.parametrize(
    ("options", "said"),
    [({"nproc_per_node": 1}, "from 2 to 1024"), ({"num_updates": 0}, "of 1 or more"), ({"num_updates": True}, "True")],
)
def test_counts_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    """Before anything runs."""
    with pytest.raises(LaunchError, match=said):
        check_program("train.py", **options)


def test_options_of_the_machine_alone_are_refused(tmp_path: Path, run_command: Run) -> None:
    """Status 2 and what to leave out."""
    done = run_command("doctor", write(tmp_path, programs.RIGHT), "--no-live")
    assert done.returncode == 2
    assert "found: `--no-live`" in done.stderr
