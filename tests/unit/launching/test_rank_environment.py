# SPDX-License-Identifier: Apache-2.0
"""The environment of a rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddpilot.environments import nvml
from ddpilot.environments.nvml import NvmlDevices
from ddpilot.errors import LaunchError
from ddpilot.launching.rank_environment import (
    NodePlacement,
    choose_num_threads,
    count_cores,
    default_variables,
    import_time_variables,
    rank_variables,
    resolve_nproc,
)

ALONE = NodePlacement(world_size=3, local_world_size=3)


def variables_of(rank: int, backend: str | None = None) -> dict[str, str]:
    """The variables of one of three ranks."""
    return rank_variables(launch_id="abc", rank=rank, placement=ALONE, master_port=4711, num_threads=2, backend=backend)


def test_rank_variables_number_the_rank_and_the_world() -> None:
    """Rank, sizes, address and run id are torchrun's for a single node."""
    found = variables_of(2)
    assert [found[name] for name in ("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK")] == ["2", "2", "2", "0"]
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE")
    assert [found[name] for name in sizes] == ["3", "3", "3", "1"]
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "4711")
    assert found["TORCHELASTIC_RUN_ID"] == found["DDPILOT_LAUNCH"] == "abc"
    assert found["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert found["OMP_NUM_THREADS"] == "2"


def test_rank_variables_on_the_second_of_two_nodes() -> None:
    """Ranks are numbered over all nodes, and local ranks on each."""
    placement = NodePlacement(
        world_size=5, local_world_size=3, first_rank=2, node_rank=1, num_nodes=2, master_addr="10.0.0.1"
    )
    assert list(placement.ranks) == [2, 3, 4]
    found = rank_variables(launch_id="abc", rank=4, placement=placement, master_port=4711, num_threads=2, backend=None)
    assert [found[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")] == ["4", "2", "1"]
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    assert [found[name] for name in sizes] == ["5", "3", "2"]
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "4711")


def test_rank_variables_carry_the_backend_only_when_it_was_given() -> None:
    """Without `backend`, `init_group` chooses, and no variable is set."""
    assert "DDPILOT_BACKEND" not in variables_of(0)
    assert variables_of(0, "gloo")["DDPILOT_BACKEND"] == "gloo"


def test_default_variables_pin_collectives_to_loopback() -> None:
    """gloo and NCCL listen on the loopback interface of a single-node group."""
    defaults = default_variables()
    assert {defaults["GLOO_SOCKET_IFNAME"], defaults["NCCL_SOCKET_IFNAME"]} <= {"lo", "lo0"}


@pytest.mark.parametrize(
    "name",
    [
        *("TORCH_X", "TORCHDYNAMO_DISABLE", "PYTORCH_JIT", "ATEN_CPU_CAPABILITY", "CUDA_VISIBLE_DEVICES"),
        *("OMP_NUM_THREADS", "GOMP_X", "KMP_X", "MKL_X", "OPENBLAS_X", "ONEDNN_X"),
        *("PYTHONPATH", "LD_PRELOAD", "MALLOC_ARENA_MAX", "LANG", "LC_ALL"),
    ],
)
def test_import_time_variables_keep_what_libraries_read_on_import(name: str) -> None:
    """Such a variable needs a new rank server when it changes."""
    assert import_time_variables({name: "1", "HOME": "h", "RANK": "0"}) == {name: "1"}


def test_import_time_variables_leave_out_what_torch_sets_itself() -> None:
    """A first optimizer in the notebook must not cost a new rank server."""
    assert import_time_variables({"TORCHINDUCTOR_CACHE_DIR": "/somewhere", "TORCH_LOGS": "a"}) == {"TORCH_LOGS": "a"}


@pytest.mark.parametrize(
    ("text", "expected"), [("3", 3), ("4,2", 4), (" 5 ", 5), ("0", None), ("-2", None), ("many", None), ("", None)]
)
def test_choose_num_threads_follows_omp_num_threads_when_it_is_a_number(text: str, expected: int | None) -> None:
    """The first number counts; nonsense, zero and negative numbers mean cores / ranks."""
    alone = max(1, count_cores() // 2)
    assert choose_num_threads({"OMP_NUM_THREADS": text}, 2) == (expected or alone)


def test_choose_num_threads_shares_the_cores_and_gives_at_least_one() -> None:
    """Cores / ranks, and 1 where there are more ranks than cores."""
    assert choose_num_threads({}, 1) == count_cores()
    assert choose_num_threads({}, 1000 * count_cores()) == 1


def test_default_variables_let_ranks_that_stay_outlive_errors_of_nccl() -> None:
    """A watchdog that ends the process would take the variables of a session with it."""
    assert default_variables()["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert default_variables(stays=True) == default_variables() | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


Set = Callable[[int], None]


@pytest.fixture
def have_gpus(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Sets the number of GPUs that the driver reports."""

    def set_to(num_gpus: int) -> None:
        devices = NvmlDevices(tuple(f"GPU-{number}" for number in range(num_gpus)))
        monkeypatch.setattr(nvml, "read_nvml", lambda: devices if num_gpus else None)

    return set_to


@pytest.mark.parametrize(
    ("asked", "num_gpus", "visible", "found", "note"),
    [
        ("auto", 4, None, 4, ""),
        ("auto", 4, "1,3", 2, ""),
        ("auto", 0, None, 1, "no GPU found, so one rank runs on the CPU; `nproc_per_node=2` starts two ("),
        ("gpu", 2, None, 2, ""),
        ("cpu", 0, None, count_cores(), ""),
        ("cpu", 2, None, count_cores(), ""),
        (3, 0, None, 3, ""),
        (2, 2, None, 2, ""),
        (3, 2, None, 3, "3 ranks on 2 GPUs: `init_group()` uses gloo, since NCCL refuses two ranks on one GPU"),
    ],
)
def test_resolve_nproc_follows_the_visible_gpus(
    asked: int | str, num_gpus: int, visible: str | None, found: int, note: str, have_gpus: Set
) -> None:
    """A word becomes a number; a number that may be unexpected is explained."""
    have_gpus(num_gpus)
    notes: list[str] = []
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert resolve_nproc(asked, environ, notes.append) == found
    assert [each[: len(note)] for each in notes] == ([note] if note else [])


def test_resolve_nproc_refuses_gpu_if_none_is_visible(have_gpus: Set) -> None:
    """The error names the variable that hides them, and the option as it was given."""
    have_gpus(0)
    with pytest.raises(LaunchError, match=r'`nproc_per_node="gpu"`: no GPU is visible\. Check `nvidia-smi` and'):
        resolve_nproc("gpu", {}, print)
    have_gpus(2)
    with pytest.raises(LaunchError, match=r"-n gpu: no GPU is visible \(CUDA_VISIBLE_DEVICES=''\).* -n 2 or -n cpu"):
        resolve_nproc("gpu", {"CUDA_VISIBLE_DEVICES": ""}, print, write="-n {}".format)


def test_resolve_nproc_refuses_nccl_if_ranks_share_a_gpu(have_gpus: Set) -> None:
    """NCCL would fail later, with a less useful message."""
    have_gpus(2)
    with pytest.raises(LaunchError, match=r"NCCL refuses two ranks on one GPU\. Use `nproc_per_node=2`, or `backend="):
        resolve_nproc(3, {}, print, backend="cpu:gloo,cuda:nccl")
