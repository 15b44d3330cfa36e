# SPDX-License-Identifier: Apache-2.0
"""Loop on two emulated accelerators: the CPU's numbers, no wait of the host, and nothing that spoils the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpilot import Launcher
from tests.accelerator import SITE, environment, masked_environment, training, why_not
from tests.preload import PRELOAD

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one"),
    pytest.mark.timeout(400),
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks find the device through this process's `sys.path` and environment."""
    monkeypatch.syspath_prepend(str(SITE))
    for name, value in environment(2).items():
        monkeypatch.setenv(name, value)


def launch(fn: Any, *args: Any) -> Any:
    """What each of two ranks returned, which have a device each."""
    return Launcher(nproc_per_node=2, timeout_s=300, preload=PRELOAD).run(fn, *args)


def run_on_cpu(fn: Any) -> Any:
    """What one rank without the device returned."""
    return Launcher(nproc_per_node=1, timeout_s=300, preload=PRELOAD, env=masked_environment()).run(fn)[0]


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
    ((num, said),) = Launcher(nproc_per_node=1, timeout_s=300, preload=PRELOAD).run(training.train_on_ignored_targets)
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
