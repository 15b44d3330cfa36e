# SPDX-License-Identifier: Apache-2.0
"""The examples with loops of their own: the same numbers on any number of ranks, and however they are started."""

from __future__ import annotations

import difflib
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpilot
from examples import contrastive, digits_loop, digits_plain, gan, gpt
from tests.dist import gpt_runs
from tests.dist.training.bodies import make_launcher
from tests.preload import PRELOAD, SKLEARN, WITH_SKLEARN
from tests.soak import IS_SOAK, soak

EXAMPLES = Path(__file__).parents[2] / "examples"
DDPILOT = Path(sys.executable).with_name("ddpilot")


def launch(num_ranks: int, fn: Any, *args: Any) -> Any:
    """What every rank returned; scikit-learn is imported once for all."""
    launcher = replace(make_launcher(num_ranks), preload=(*PRELOAD, *SKLEARN), env=WITH_SKLEARN)
    return launcher.run(fn, *args)


def train_small(folder: Path | None) -> dict[str, Any]:
    """The digits and the GAN in float64 at a small size, and the GPT: on one rank all of it, else the rest in `folder`,
    if there is one.
    """
    torch.set_default_dtype(torch.float64)
    losses, accuracy = digits_loop.train(1)
    is_alone = os.environ["WORLD_SIZE"] == "1"
    return {
        "plain": digits_plain.train(1) if is_alone else None,
        "digits": {"losses": losses, "accuracy": accuracy},
        "gan": gan.train(1, global_batch_size=300),
        "gpt": gpt_runs.train("float64") if is_alone else folder and gpt_runs.resume(folder),
    }


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """By number of ranks. The GPT trains on 1 rank, without a stop; and on 3, killed, and then on 2. In the soak the
    others train on 4 as well."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with pytest.raises(ddpilot.RankError, match="rank 1 was killed by SIGKILL"):
        launch(3, gpt_runs.train_until_killed, folder)
    return {
        **({4: launch(4, train_small, None)[0]} if IS_SOAK else {}),
        2: launch(2, train_small, folder)[0],
        1: launch(1, train_small, None)[0],
    }


def assert_close(seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Weights agree up to the order of summation."""
    for name, weight in expected.items():
        assert (seen[name] - weight).norm() <= 1e-9 * weight.norm(), name


@pytest.mark.timeout(200)
def test_digits_learn_the_same_at_any_world_size(learnt: dict[int, Any]) -> None:
    """Loss by loss, and the accuracy to the last image."""
    for num in set(learnt) - {1}:
        assert learnt[num]["digits"]["losses"] == pytest.approx(learnt[1]["digits"]["losses"], rel=1e-10)
        assert learnt[num]["digits"]["accuracy"] == learnt[1]["digits"]["accuracy"] > 0.5


@pytest.mark.timeout(200)
def test_gan_learns_the_same_at_any_world_size(learnt: dict[int, Any]) -> None:
    """Both losses of every batch, what the critic knows, the weights, and the images in the order of the dataset."""
    expected = learnt[1]["gan"]
    for seen in (learnt[num]["gan"] for num in set(learnt) - {1}):
        assert torch.allclose(torch.tensor(seen["losses"]), torch.tensor(expected["losses"]), rtol=1e-9, atol=0)
        assert seen["right"] == pytest.approx(expected["right"], rel=1e-12)
        assert_close(seen["weights"], expected["weights"])
        assert torch.allclose(seen["images"], expected["images"], rtol=0, atol=1e-9)
    assert expected["images"].shape == (1797, 64)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-10), ("bf16", 2**-8)])
def test_gpt_goes_on_after_a_kill_on_another_number_of_ranks(
    learnt: dict[int, Any], precision: str, tolerance: float
) -> None:
    """From update 4 of 3 ranks on 2, sharded: the losses, the losses on another file, and in float64 the weights.

    In bfloat16, whose roundoff is 2**-8, sums in another order are rounded to other numbers. An update
    changes the losses by several times as much.
    """
    seen = learnt[2]["gpt"][precision]
    expected = learnt[1]["gpt"] if precision == "float64" else learnt[2]["gpt"]["bf16 whole"]
    assert len(expected["losses"]) == 2 * gpt_runs.NUM_UPDATES
    assert seen["losses"] == pytest.approx(expected["losses"][8:], rel=tolerance)
    assert seen["num_updates"] == expected["num_updates"] == gpt_runs.NUM_UPDATES
    assert list(expected["val_losses"]) == [3, 6, 9]
    assert seen["val_losses"] == pytest.approx({at: expected["val_losses"][at] for at in (6, 9)}, rel=tolerance)
    if precision == "float64":
        assert_close(seen["weights"], expected["weights"])


def train_contrastive() -> dict[str, Any]:
    """An epoch in float64."""
    torch.set_default_dtype(torch.float64)
    return contrastive.train(1)


@pytest.mark.timeout(200)
def test_contrastive_learns_the_same_at_any_world_size() -> None:
    """Each image is compared with those of all ranks; 3 ranks have unequal parts of a batch."""
    (expected,), *others = (launch(num, train_contrastive) for num in ((1, 2, 3) if IS_SOAK else (1, 3)))
    assert expected["losses"][-1] < 0.9 * expected["losses"][0]
    for seen in (rank for ranks in others for rank in ranks):
        assert seen["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        assert seen["num_right"] == expected["num_right"]
        for name, weight in expected["weights"].items():
            assert (seen["weights"][name] - weight).norm() <= 1e-10 * weight.norm(), name


def test_a_plain_loop_needs_few_more_lines() -> None:
    """digits_loop.py has at most five lines that digits_plain.py has no counterpart of; it is not longer either."""
    plain, loop = (
        (EXAMPLES / f"{name}.py").read_text().split("from __future__")[1].splitlines()
        for name in ("digits_plain", "digits_loop")
    )
    changes = difflib.SequenceMatcher(None, plain, loop, autojunk=False).get_opcodes()
    added = sum(max(0, (stop - start) - (end - begin)) for _, begin, end, start, stop in changes)
    in_plain = sum(end - begin for kind, begin, end, _, _ in changes if kind != "equal")
    assert 0 < added <= 5
    assert 5 < in_plain < 20, "most of it stays as it is"
    assert len(loop) <= len(plain)


@pytest.mark.timeout(200)
def test_the_plain_script_learns_as_well(learnt: dict[int, Any]) -> None:
    """What is compared with has no mistake that would make it short: both know most digits after an epoch."""
    losses, accuracy = learnt[1]["plain"]
    assert len(losses) == len(learnt[1]["digits"]["losses"])
    assert accuracy > 0.5


@pytest.mark.timeout(150)
@soak
def test_a_script_prints_the_same_alone_and_with_ddpilot_run() -> None:
    """`python digits_loop.py`, and `ddpilot run digits_loop.py -n 2`: the same losses, to single precision."""
    script = EXAMPLES / "digits_loop.py"
    commands: list[list[str | Path]] = [[sys.executable, script], [DDPILOT, "run", script, "-n", "2", "--"]]
    started = [
        subprocess.Popen(
            [*words, "--epochs", "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for words in commands
    ]
    ended = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    alone, together = ([float(number) for number in re.findall(r"\d+\.\d{2,}", out)] for out, _ in ended)
    assert len(alone) == 2
    assert together == pytest.approx(alone, abs=2e-3)
    assert all(line.startswith("[rank 0] ") for line in ended[1][0].splitlines())


def run_scripts(checkpoint_dir: str) -> None:
    """The other two as this rank's main program."""
    few = ["--max-updates", "4", "--validate-every", "2", "--files", "2"]
    for module, options in ((gan, ["--epochs", "1"]), (gpt, [*few, "--checkpoint-dir", checkpoint_dir])):
        sys.argv = [str(module.__file__), *options]
        runpy.run_path(sys.argv[0], run_name="__main__")


def test_scripts_show_what_they_learnt(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Five drawn images of eight rows, and some characters behind the prompt; from rank 0 alone."""
    launch(2, run_scripts, str(tmp_path / "checkpoints"))
    printed = capfd.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(printed) if "the critic knows" in line) + 1
    images = [line.removeprefix("[rank 0] ") for line in printed[first : first + 8]]
    assert {len(row) for row in images} == {5 * 16 + 4 * 3}
    assert any("a character of a file not seen" in line for line in printed)
    assert "[rank 0] import os" in printed
    assert all(line.startswith("[rank 0] ") for line in printed)
    assert (tmp_path / "checkpoints" / "latest").exists()
