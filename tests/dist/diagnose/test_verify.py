# SPDX-License-Identifier: Apache-2.0
"""`verify` on real ranks: right programs are equal to one rank, and the cause of each planted fault is named."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import ddpilot
from ddpilot.diagnose.verify.verify import verify
from ddpilot.errors import LaunchError
from tests.dist.diagnose import verify_kinds, verify_programs
from tests.dist.in_process import Run, run_command
from tests.soak import IS_SOAK, often

__all__ = ["run_command"]

ROOT = Path(__file__).parents[3]

RIGHT = (
    *("with_adam", "with_group_norm", "with_dropout", "with_gradients_by_hand", "with_whole_batch_divided"),
    *("with_loop", "with_trainer", "returns_mean"),
)
RIGHT_KINDS = (
    *("with_two_optimizers", "with_accumulation", "with_autocast", "with_scaler", "with_closure", "with_schedule"),
    *("with_sharded_state", "with_sharded_parameters", "with_workers", "with_divided_stream", "with_batch_sampler"),
    *("with_own_batch_sampler", "with_average_of_weights", "with_global_batch_size", "with_weighted_mean"),
    *(
        "with_gathered_pairs",
        "with_other_seed_on_each_rank",
        "with_gradients_that_are_zero",
        "with_noise",
        *("ends_early", "with_random_batches", "with_mixup"),
    ),
)
FAULTY = {
    "loss_times_world_size": "DDP823",
    "averaged_twice": "DDP823",
    "summed_by_hand": "DDP823",
    "sum_of_losses": "DDP823",
    "unequal_parts": "DDP406",
    "ignored_targets": "DDP406",
    "class_weights": "DDP406",
    "clipped_before_reduced": "DDP406",
    "loss_of_pairs": "DDP406",
    "own_permutation": "DDP822",
    "augmented_by_process": "DDP822",
    "same_batches": "DDP401",
    "alone_on_every_rank": "DDP401",
    "batch_norm": "DDP408",
    "same_noise": "DDP407",
    "layer_outside": "DDP324",
    "bypassed": "DDP321",
    "left_in_no_sync": "DDP323",
    "scaled_learning_rate": "DDP824",
    "seeded_by_world_size": "DDP821",
    "seeded_by_rank": "DDP325",
    "returns_own_loss": "DDP825",
}
FAULTY_KINDS = {
    "reduced_first": "DDP323",
    "parts_of_stream_alike": "DDP401",
    "stream_in_other_order": "DDP822",
    "own_learning_rate": "DDP325",
    "forgotten_layer": "DDP320",
    "same_noise_in_model": "DDP407",
    "gathered_without_gradient": "DDP823",
    "stops_by_rank": "DDP326",
    "scaled_later": "DDP823",
    "scaled_with_noise": "DDP823",
    "normalized_by_hand": "DDP406",
    "part_of_data": "DDP403",
}

OFTEN = (
    *("with_dropout", "with_loop", "with_trainer", "with_sharded_parameters", "with_workers", "with_random_batches"),
    *("loss_times_world_size", "class_weights", "own_permutation", "same_batches", "batch_norm", "seeded_by_rank"),
    *("scaled_learning_rate", "seeded_by_world_size", "returns_own_loss", "forgotten_layer"),
)
"""One program with each finding that is verify's own, some whose finding is guard's, which has tests of all of its, and
right ones that differ most; the soak runs the others as well."""


def codes(found: ddpilot.Verification) -> list[str]:
    """Codes of the findings, in their order."""
    return [finding.code for finding in found.findings]


@pytest.mark.timeout(60)
@often(*OFTEN)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_equal(name: str) -> None:
    """Up to rounding, in all updates; no error is reported."""
    found = verify(getattr(verify_programs, name), nproc_per_node=2, num_updates=4)
    assert found.is_equal, str(found)
    assert found.exit_status == 0, str(found)
    assert "are equal" in found.summary or "exactly equal" in found.summary
    assert {row.num_samples[0] for row in found.rows} == {row.num_samples[1] for row in found.rows}


@pytest.mark.timeout(60)
@often(*OFTEN)
@pytest.mark.parametrize("name", RIGHT_KINDS)
def test_a_right_program_of_another_kind_is_equal(name: str) -> None:
    """Other optimizers, precisions, loaders and wrappers."""
    found = verify(getattr(verify_kinds, name), nproc_per_node=2, num_updates=4)
    assert found.is_equal, str(found)
    assert found.rows
    assert found.exit_status == 0, str(found)


@pytest.mark.timeout(60)
@often(*OFTEN)
@pytest.mark.parametrize("name", FAULTY)
def test_the_cause_of_a_fault_is_named(name: str) -> None:
    """The first finding is the cause, with the line where one is to blame, and the verdict is "different"."""
    found = verify(getattr(verify_programs, name), nproc_per_node=2, num_updates=4)
    assert found.verdict == "different", str(found)
    assert codes(found)[0] == FAULTY[name], str(found)
    assert found.exit_status == 1
    place = found.findings[0].place
    if name != "returns_own_loss":
        assert place is not None, str(found)
        assert place.file.endswith("verify_programs.py")
        assert place.text in Path(place.file).read_text()


@pytest.mark.timeout(60)
@often(*OFTEN)
@pytest.mark.parametrize("name", FAULTY_KINDS)
def test_the_cause_of_a_fault_of_another_kind_is_named(name: str) -> None:
    """Also where optimizers, loaders and losses are the program's own."""
    found = verify(getattr(verify_kinds, name), nproc_per_node=2, num_updates=4)
    assert found.verdict == "different", str(found)
    assert codes(found)[0] == FAULTY_KINDS[name], str(found)


@pytest.mark.timeout(120)
def test_three_ranks_are_compared_like_two() -> None:
    """Their factor is named in the summary; a right program is equal, and a batch is three times as large."""
    equal = verify(verify_programs.with_group_norm, nproc_per_node=3, num_updates=2)
    assert equal.is_equal, str(equal)
    assert equal.rows[0].num_samples == (24, 24)
    assert equal.notes[-1].startswith("the first 2 updates were compared; `--updates N`")
    wrong = verify(verify_programs.averaged_twice, nproc_per_node=3, num_updates=2)
    assert codes(wrong)[0] == "DDP823"
    assert "0.3333 times" in wrong.summary
    if IS_SOAK:  # of two ranks above
        weighted = verify(verify_programs.class_weights, nproc_per_node=3, num_updates=2)
        assert codes(weighted)[0] == "DDP406"


@pytest.mark.timeout(60)
def test_a_program_that_is_not_repeatable_cannot_be_compared() -> None:
    """Two runs on one rank differ, which is said instead of a cause."""
    found = verify(verify_programs.unseeded, nproc_per_node=2)
    assert (found.verdict, codes(found)) == ("unknown", ["DDP820"])
    assert "two runs on one rank" in found.summary


@pytest.mark.timeout(60)
def test_random_numbers_that_no_run_on_one_rank_has_cannot_be_compared() -> None:
    """Draws from numpy during training are named, and the verdict is "unknown"."""
    found = verify(verify_kinds.draws_from_numpy, nproc_per_node=2, num_updates=2)
    assert found.verdict == "unknown", str(found)
    assert "DDP827" in codes(found)
    assert "numpy" in found.summary


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fails_on_two", r"^the run on 2 ranks failed: rank 1 raised ValueError: rank 1 has bad data"),
        ("fails_on_one", r"^the run on 1 rank failed: rank 0 raised ValueError: needs several ranks"),
        ("waits_for_ever", r"^the run on 2 ranks failed: .*(had not|desync|never)"),
    ],
)
def test_a_program_that_fails_is_no_difference(name: str, expected: str) -> None:
    """The verdict is "unknown"; the run that failed is named, and the traceback is in the text."""
    found = verify(getattr(verify_kinds, name), nproc_per_node=2, timeout_s=5 if name == "waits_for_ever" else 50)
    assert found.verdict == "unknown"
    assert re.search(expected, found.summary), found.summary
    assert "\n" not in found.summary
    assert found.exit_status == 1
    if name.startswith("fails"):
        assert "ValueError" in found.details
        assert "ValueError" in str(found)


@pytest.mark.timeout(60)
def test_updates_before_a_repeated_sample_are_compared() -> None:
    """The last update of the epoch has 4 samples on two ranks, and 3 on one."""
    found = verify(verify_kinds.with_padded_end, nproc_per_node=2)
    assert found.is_equal, str(found)
    assert len(found.rows) == 2
    assert "from update 3 on nothing is compared: the sampler repeats 1 of its samples" in str(found)


@pytest.mark.timeout(60)
def test_updates_after_a_step_that_failed_are_compared() -> None:
    """The program catches the exception of its second step."""
    found = verify(verify_programs.sum_after_a_step_that_failed, nproc_per_node=2)
    assert codes(found)[:1] == ["DDP823"], str(found)
    assert len(found.rows) > 2


@pytest.mark.timeout(60)
def test_a_program_without_optimizer_cannot_be_compared() -> None:
    """There is nothing to compare."""
    found = verify(verify_programs.steps_without_samples, nproc_per_node=2)
    assert found.verdict == "unknown"
    assert found.summary == "on 2 ranks no optimizer stepped, so that there is nothing to compare"


@pytest.mark.timeout(60)
def test_all_updates_are_compared_if_none_is_the_limit() -> None:
    """12 updates of two epochs; the returned rows are numbered from 1."""
    found = verify(verify_programs.with_group_norm, nproc_per_node=2, num_updates=None)
    assert found.is_equal, str(found)
    assert [row.update for row in found.rows] == list(range(1, 13))
    assert not any("were compared" in note for note in found.notes)
    assert json.loads(json.dumps(found.to_dict()))["updates"][0]["num_samples"] == [16, 16]


SCRIPT = """
import sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def train(factor=1):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    for x, y in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        (loss * (dist.get_world_size() if factor == 2 else 1)).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.4f}, took {time.time() % 1:.4f} s")
    dist.destroy_process_group()

def train_wrong():
    train(2)

if __name__ == "__main__":
    train(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that is right with 1 on its command line, and wrong with 2."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.timeout(120)
def test_command_compares_a_script_with_its_own_words(run_command: Run, script: Path) -> None:
    """Words after -- are the script's; the exit status is 0; the losses and times that rank 0 prints may differ."""
    right = run_command("verify", script, "-n", "2", "--json", "--updates", "2", "--", "1")
    assert right.returncode == 0, right.stdout + right.stderr
    assert right.stderr.splitlines()[0] == "run 1: 2 ranks, as it is"
    found: dict[str, Any] = json.loads(right.stdout)
    assert found["verdict"] == "equal"
    assert [each["code"] for each in found["findings"]] == ["DDP414"]


@pytest.mark.timeout(120)
def test_command_compares_a_function_of_a_script(run_command: Run, script: Path) -> None:
    """The part under `if __name__` does not run; a line for each update; the exit status is 1 for a difference."""
    wrong = run_command("verify", f"{script}:train_wrong", "-n", "2", "-v", "--updates", "2")
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert "wrong-scale  DDP823" in wrong.stdout
    assert "update    samples" in wrong.stdout
    assert re.search(r"^2 +8 \| 8 ", wrong.stdout, re.MULTILINE), wrong.stdout


@pytest.mark.timeout(60)
def test_a_script_is_run_as_plain_python_runs_it(run_command: Run, tmp_path: Path) -> None:
    """Its name, file, words and folder are those of `python train.py`, and what it registered runs at its end."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "helper.py").write_text("WIDTH = 4\n")
    path = tmp_path / "folder" / "train.py"
    path.write_text(
        "import atexit, multiprocessing, os, sys\n"
        "import helper, torch\n"
        "import torch.distributed as dist\n"
        "assert __name__ == '__main__' and __file__ == os.path.abspath(sys.argv[0]), (__name__, __file__)\n"
        "assert sys.path[0] == os.path.dirname(__file__) and sys.argv[1:] == ['--lr', '0.1'], (sys.path, sys.argv)\n"
        "assert sys.modules['__main__'].__dict__ is globals()\n"
        "assert multiprocessing.parent_process() is None\n"
        "dist.init_process_group('gloo')\n"
        f"name = {str(tmp_path)!r} + f'/ended_{{dist.get_world_size()}}_{{dist.get_rank()}}'\n"
        "atexit.register(lambda: open(name, 'w').close())\n"
        "own = torch.tensor([torch.initial_seed() % 2**31])\n"
        "drawn = [torch.zeros_like(own) for _ in range(dist.get_world_size())]\n"
        "dist.all_gather(drawn, own)\n"
        "assert len({int(each) for each in drawn}) == dist.get_world_size(), drawn\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(helper.WIDTH, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))\n"
        "x = torch.randn(8, helper.WIDTH).chunk(dist.get_world_size())[dist.get_rank()]\n"
        "model(x).mean().backward()\n"
        "optimizer.step()\n"
        "is_alone = dist.get_world_size() == 1\n"
        "dist.destroy_process_group()\n"
        "os._exit(0) if is_alone else sys.exit()\n"
    )
    done = run_command("verify", path, "-n", "2", "--", "--lr", "0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"ended_1_0", "ended_2_0", "ended_2_1"} <= {each.name for each in tmp_path.iterdir()}


@pytest.mark.timeout(60)
def test_command_ends_a_script_that_hangs(run_command: Run, tmp_path: Path) -> None:
    """After --timeout-s, with what is known of its ranks."""
    path = tmp_path / "hangs.py"
    path.write_text(
        "import time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "time.sleep(3600 if dist.get_rank() else 0)\n"
        "dist.barrier()\n"
    )
    done = run_command("verify", path, "-n", "2", "--timeout-s", "6")
    assert done.returncode == 1
    assert "its ranks had not ended after 6 s" in done.stdout


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("missing.py", "-n", "2"), "missing.py"),
        (("train.py:trian", "-n", "2"), "Did you mean `train`?"),
        (("train.py:train", "-n", "2", "--", "3"), "which a function does not have"),
        (("train.py", "-n", "1"), "from 2 to 1024"),
    ],
)
def test_command_refuses_what_it_cannot_run(
    run_command: Run, words: tuple[str, ...], expected: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names what was found; nothing is run."""
    monkeypatch.chdir(script.parent)
    done = run_command("verify", *words)
    assert done.returncode not in (0, 1) or "Error" in done.stderr or "error" in done.stderr, done.stderr
    assert expected in done.stderr + done.stdout
    assert "run 1" not in done.stderr
    assert "Traceback" not in done.stderr


def test_verify_refuses_to_run_in_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank must not start ranks."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(LaunchError, match="this process is itself a rank"):
        verify(verify_programs.with_adam, nproc_per_node=2)


@pytest.mark.parametrize("number", [1, 0, True, "2", 2000])
def test_verify_refuses_a_wrong_number_of_ranks(number: Any) -> None:
    """Two or more."""
    with pytest.raises(LaunchError, match="from 2 to 1024"):
        verify(verify_programs.with_adam, nproc_per_node=number)


def test_environment_is_left_as_it_was() -> None:
    """Nothing of a run stays in this process."""
    assert "DDPILOT_UPDATES" not in os.environ
