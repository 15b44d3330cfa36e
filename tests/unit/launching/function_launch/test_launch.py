# SPDX-License-Identifier: Apache-2.0
"""What is refused before anything starts, and how many ranks are meant."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from ddpilot.environments import nvml
from ddpilot.environments.nvml import NvmlDevices
from ddpilot.errors import LaunchError
from ddpilot.launching.function_launch.launch import check_function, resolve_count, run_local
from ddpilot.launching.options import LaunchOptions
from ddpilot.launching.rank_environment import count_cores
from ddpilot.output.writer import LabelledWriter


def generator() -> Iterator[int]:
    """Yields."""
    yield 1


async def coroutine() -> None:
    """Awaits."""


async def async_generator() -> AsyncIterator[int]:
    """Does both."""
    yield 1


class Trainer:
    """Is called in several ways."""

    def fit(self) -> None:
        """A method."""

    def steps(self) -> Iterator[int]:
        """A generator method."""
        yield 1

    def __call__(self) -> None: ...


class YieldingTrainer:
    """Calling it gives a generator."""

    def __call__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (generator, "generator function"),
        (functools.partial(functools.partial(generator)), "generator function"),
        (Trainer().steps, "generator function"),
        (YieldingTrainer(), "generator function"),
        (coroutine, "coroutine function"),
        (async_generator, "asynchronous generator function"),
    ],
)
def test_check_function_refuses_what_would_run_nothing(function: Any, kind: str) -> None:
    """Calling a generator or a coroutine function only makes an object; the error says what to do."""
    with pytest.raises(LaunchError, match=f"it is an? {kind}: calling it runs none of its code. Launch an ordinary"):
        check_function(function)


def test_check_function_refuses_what_cannot_be_called() -> None:
    """`launch(train())` instead of `launch(train)` is a common slip."""
    with pytest.raises(LaunchError, match=r"launching: None is not callable. Give a function and its arguments"):
        check_function(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (check_function, "check_function"),
        (functools.partial(check_function, print), "check_function"),
        (Trainer().fit, "Trainer.fit"),
        (Trainer(), "Trainer"),
        (Trainer, "Trainer"),
        (print, "print"),
        (lambda: "x", "<lambda>"),
    ],
)
def test_check_function_names_what_is_called(function: Any, name: str) -> None:
    """Functions, partials, methods, objects, classes and builtins have a name for messages."""
    assert check_function(function) == name


@pytest.mark.parametrize(
    ("environ", "who"),
    [
        ({"TORCHELASTIC_RUN_ID": "x", "DDPILOT_LAUNCH": "x"}, "ddpilot"),
        ({"TORCHELASTIC_RUN_ID": "y"}, "torchrun"),
        ({"TORCHELASTIC_RUN_ID": "y", "DDPILOT_LAUNCH": "x"}, "torchrun"),
    ],
)
def test_run_local_refuses_to_launch_inside_a_rank(
    environ: dict[str, str], who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says which rank this is and who started it; `train` can be called directly there."""
    for name, value in {**environ, "RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as caught:
        run_local(LaunchOptions(), print, (), {})
    assert f"this process is itself rank 1 of 4 (started by {who}). Call `print` directly" in str(caught.value)


def count(
    num_devices: int, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str] | None = None, **fields: Any
) -> int:
    """The number of ranks on a machine whose driver reports `num_devices` devices."""
    devices = NvmlDevices(tuple(f"GPU-{number}" for number in range(num_devices)))
    monkeypatch.setattr(nvml, "read_nvml", lambda: devices if num_devices else None)
    options = LaunchOptions(**fields)
    return resolve_count(options, environ or {}, LabelledWriter("labelled", None))


def test_resolve_count_takes_the_visible_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" and "gpu" give one rank per device that CUDA_VISIBLE_DEVICES leaves."""
    assert count(4, monkeypatch) == 4
    assert count(4, monkeypatch, nproc_per_node="gpu") == 4
    assert count(4, monkeypatch, {"CUDA_VISIBLE_DEVICES": "1,3"}) == 2


def test_resolve_count_gives_one_with_a_hint_when_there_is_no_accelerator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hint says how to get two ranks on the CPU."""
    assert count(0, monkeypatch) == 1
    assert "no accelerator found, so one rank runs on the CPU; `nproc_per_node=2`" in capsys.readouterr().err


def test_resolve_count_counts_cores_for_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "cpu" means the cores that this process may use, devices or not."""
    assert count(0, monkeypatch, nproc_per_node="cpu") == count_cores()
    assert count(4, monkeypatch, nproc_per_node="cpu") == count_cores()


def test_resolve_count_refuses_gpu_when_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who asked for GPUs wants to train on a CPU; hidden devices are none."""
    with pytest.raises(LaunchError, match=r"no accelerator is visible\. Check `nvidia-smi` and CUDA_VISIBLE_DEVICES"):
        count(0, monkeypatch, nproc_per_node="gpu")
    with pytest.raises(LaunchError, match="no accelerator is visible"):
        count(2, monkeypatch, {"CUDA_VISIBLE_DEVICES": ""}, nproc_per_node="gpu")


def test_resolve_count_says_that_ranks_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """More ranks than GPUs work over gloo, and that is said; as many as there are say nothing."""
    assert count(1, monkeypatch, nproc_per_node=2) == 2
    assert "2 ranks on 1 accelerator: ranks share them, over gloo" in capsys.readouterr().err
    assert count(2, monkeypatch, nproc_per_node=2) == 2
    assert capsys.readouterr().err == ""


def test_resolve_count_refuses_nccl_when_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would fail later and say less."""
    with pytest.raises(LaunchError, match=r"NCCL refuses two ranks on one GPU\. Use `nproc_per_node=2`, or `backend="):
        count(2, monkeypatch, nproc_per_node=3, backend="cpu:gloo,cuda:nccl")
