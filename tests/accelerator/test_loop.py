# SPDX-License-Identifier: Apache-2.0
"""Loop on two emulated accelerators: the CPU's numbers, no wait of the host, and nothing that spoils the weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ddpilot import Launcher
from ddpilot.checkpoint.directory import CheckpointDir
from tests.accelerator import SITE, environment, loops, masked_environment, training, why_not
from tests.preload import PRELOAD
from tests.soak import soak

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one"),
    pytest.mark.timeout(400),
]


@pytest.fixture(autouse=True)
def _site_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks find modules where this process does."""
    monkeypatch.syspath_prepend(str(SITE))


def launch(fn: Any, *args: Any, num_ranks: int = 2) -> Any:
    """What each rank returned, which have a device each."""
    return Launcher(nproc_per_node=num_ranks, timeout_s=300, env=environment(num_ranks), preload=PRELOAD).run(fn, *args)


def run_on_cpu(fn: Any, num_ranks: int = 1) -> Any:
    """What rank 0 of ranks without a device returned."""
    return Launcher(nproc_per_node=num_ranks, timeout_s=300, preload=PRELOAD, env=masked_environment()).run(fn)[0]


def test_loop_gives_the_numbers_of_the_cpu() -> None:
    """An MLP, a CNN and a small GPT, float64: losses, weights, metric and updates agree to 1e-10 on both ranks."""
    expected = run_on_cpu(training.train_kinds)
    for learnt in launch(training.train_kinds):
        for kind in training.KINDS:
            seen, known = learnt[kind], expected[kind]
            assert seen["losses"] == pytest.approx(known["losses"], rel=1e-10), kind
            assert seen["metric"] == pytest.approx(known["metric"], rel=1e-10), kind
            assert seen["num_updates"] == known["num_updates"]
            for name, weight in known["weights"].items():
                assert (seen["weights"][name] - weight).norm() / weight.norm() < 1e-10, (kind, name)


def test_a_step_of_loop_makes_the_host_wait_for_nothing() -> None:
    """With clipping, a schedule, reduced values, checks for NaN, the stop flags and the loss on the progress bar."""
    for counted in launch(training.count_all_syncs):
        assert counted == {"plain": {}, "gpt": {}, "accumulated": {}}


def test_a_nan_is_reported_on_all_ranks_and_never_reaches_the_weights() -> None:
    """The batch is named that was bad; no update moves the weights for it, and training continues after the error."""
    for first, *others in zip(*launch(training.train_over_each_nan), strict=True):
        ((number, found, rank),) = first["raised"]
        assert 20 <= number <= 20 + 33
        assert rank == 1
        assert found.startswith("on rank 1 the loss is nan in epoch 0, batch 20, of samples 41; weights that are not")
        assert "weights that are not finite: none" in found
        assert first["moved"][20] == 0.0
        assert all(moved > 0 for at, moved in enumerate(first["moved"]) if at not in (20, number))
        assert all(other["weights"] == first["weights"] for other in others)


def test_a_loss_with_ignored_targets_and_no_count_is_refused_once_the_device_has_come_to_it() -> None:
    """Within the pass, for its first batch; the host does not wait for it."""
    ((num, said),) = launch(training.train_on_ignored_targets, num_ranks=1)
    assert num <= 8
    assert "in batch 0 of epoch 0: the loss contains a cross entropy that ignores targets of -100 and" in said


def test_a_run_resumes_exactly_with_the_random_state_of_the_device(tmp_path: Path) -> None:
    """Two epochs in one run are bit for bit those of two runs, dropout on the device included."""
    for whole, parts in launch(training.train_and_resume, tmp_path):
        assert whole == parts


def test_memory_that_runs_out_is_known_on_all_ranks() -> None:
    """The batch size is that of the rank with the least memory, nothing has changed, and an error says who holds it."""
    for found in launch(training.run_out_of_memory):
        assert (found["failed"], found["same"]) == ([1], True)
        assert 4 <= found["largest"] <= 64
        assert all(peak > 0 for peak in found["peaks"])
        assert "memory ran out: emu:" in found["said"]
        assert "GiB, of which this process holds" in found["said"]


@soak
def test_loop_on_four_ranks_gives_the_numbers_of_the_cpu() -> None:
    """An MLP and a small GPT, float64: losses and weights agree to 1e-10 on all ranks."""
    expected = run_on_cpu(training.train_kinds)
    for learnt in launch(training.train_kinds, num_ranks=4):
        for kind in training.KINDS:
            seen, known = learnt[kind], expected[kind]
            assert seen["losses"] == pytest.approx(known["losses"], rel=1e-10), kind
            for name, weight in known["weights"].items():
                assert (seen["weights"][name] - weight).norm() / weight.norm() < 1e-10, (kind, name)


def test_fp16_skips_the_updates_that_overflow_and_makes_those_of_the_cpu() -> None:
    """The scale falls alike on all ranks, and the weights are the CPU's."""
    expected = run_on_cpu(training.train_in_fp16, num_ranks=2)
    assert expected["done"][0] is False
    assert expected["done"][-1] is True
    for found in launch(training.train_in_fp16):
        assert found["done"] == expected["done"]
        assert found["weights"] == pytest.approx(expected["weights"], rel=1e-3)


def test_fp16_steps_two_optimizers_on_one_backward_and_waits_once_for_each() -> None:
    """Each weight moves by the rate, clipped by the rate over the norm of both: none is unscaled twice."""
    for plain, clipped in launch(loops.step_two_both_ways):
        assert plain["weights"] == pytest.approx([0.9] * 2, abs=1e-3)
        assert clipped["weights"] == pytest.approx([1 - 0.1 / math.sqrt(2)] * 2, abs=1e-3)
        assert plain["waits"] == clipped["waits"] == {"item": 2}


def test_a_step_on_a_stream_makes_the_host_wait_for_nothing() -> None:
    """What ranks exchange of each update travels from the CPU, over gloo."""
    assert list(launch(loops.count_waits_with_a_stream)) == [{}, {}]


def test_a_save_that_fails_on_rank_0_is_raised_on_all_ranks(tmp_path: Path) -> None:
    """A save is made without memory that can be locked; an error of the device is told to all, and no rank waits."""
    for number, said in launch(loops.save_without_memory, tmp_path):
        assert number == 4
        assert "an illegal memory access was encountered" in said
    with CheckpointDir(tmp_path) as checkpoints:
        found = checkpoints.latest()
    assert found is not None
    assert found.manifest.progress.step == 3
