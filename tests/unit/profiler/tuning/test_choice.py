# SPDX-License-Identifier: Apache-2.0
"""Which options are tried follows from the profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from ddpilot.findings.catalog import make_finding
from ddpilot.profiler.judgements.judged import Judged
from ddpilot.profiler.phases import SHARES, Phases
from ddpilot.profiler.rank.overrides import Call, Trial, read_calls
from ddpilot.profiler.tuning.choice import Choice, Profiled, choose_options, describe_unknown, read_names
from ddpilot.profiler.tuning.options import make_trial
from ddpilot.user_files import CodeLine

DDP = Call(
    kind="ddp",
    line=CodeLine("train.py", 10),
    values={
        "bucket_cap_mb": 25.0,
        "has_small_first_bucket": True,
        "find_unused_parameters": False,
        "static_graph": False,
        "gradient_as_bucket_view": True,
    },
)
LOADER = Call(
    kind="loader",
    line=CodeLine("train.py", 20),
    values={
        "num_workers": 0,
        "prefetch_factor": None,
        "pin_memory": False,
        "persistent_workers": False,
        "is_iterable": False,
        "is_of_loop": False,
    },
    num_passes=1,
)
FACTS = {
    "num_threads": 1,
    "num_cores": 2,
    "local_world_size": 2,
    "uses_device": False,
    "ddp": {"parameter_bytes": 60 * 2**20, "backend": "gloo"},
}


def change(call: Call, num_passes: int = 1, **values: Any) -> Call:
    """The call with other values."""
    return Call(kind=call.kind, line=call.line, values={**call.values, **values}, num_passes=num_passes)


def choose(
    shares_ms: dict[str, float],
    calls: tuple[Call, ...] = (DDP, LOADER),
    facts: dict[str, Any] | None = None,
    *,
    compression: bool = False,
    nccl_names: tuple[str, ...] = (),
    judged: tuple[Judged, ...] = (),
    interfaces: tuple[str, ...] = (),
) -> Choice:
    """The choice for updates with these shares on both of two ranks."""
    seconds = numpy.zeros((2, 10, len(SHARES)))
    for name, length_ms in shares_ms.items():
        seconds[:, :, SHARES.index(name)] = length_ms / 1e3
    phases = Phases(
        ranks=(0, 1),
        seconds=seconds,
        arrivals_s=numpy.zeros((2, 10)),
        num_samples=numpy.ones((2, 10)),
        first_update=5,
        by_site={},
    )
    profiled = Profiled(
        phases=phases,
        facts={**FACTS, **(facts or {})},
        calls=calls,
        nccl_names=nccl_names,
        environ={},
        judged=judged,
        interfaces=interfaces,
    )
    return choose_options(profiled, compression=compression)


def names(choice: Choice) -> list[str]:
    """The options as text."""
    return [str(option) for option in choice.options]


def test_nothing_is_tried_without_a_reason() -> None:
    """A script that computes."""
    assert choose({"forward": 10, "backward": 20, "data": 0.5, "communication": 1}) == Choice(options=(), advice=())


def test_workers_are_tried_where_updates_wait_for_data() -> None:
    """From none on; with persistent workers if the loader is read several times; more than now; fewer than cores."""
    shares = {"forward": 10.0, "data": 5.0}
    assert names(choose(shares)) == ["num_workers=1", "num_workers=2", "num_workers=4"]
    again = change(LOADER, num_passes=3)
    assert names(choose(shares, (again,)))[0] == "num_workers=1, persistent_workers=True"
    some = change(LOADER, num_passes=2, num_workers=2, prefetch_factor=2)
    found = names(choose(shares, (some,)))
    assert found[:3] == [
        "num_workers=1, persistent_workers=True",
        "num_workers=4, persistent_workers=True",
        "prefetch_factor=4",
    ]
    assert found[3:] == ["persistent_workers=True"]


def test_workers_are_not_tried_where_they_would_repeat_data() -> None:
    """An IterableDataset; and a program without a DataLoader."""
    choice = choose({"forward": 10, "data": 5}, (change(LOADER, is_iterable=True),))
    assert (choice.options, "IterableDataset" in choice.advice[0]) == ((), True)
    choice = choose({"forward": 10, "data": 5}, ())
    assert (choice.options, "not from a DataLoader" in choice.advice[0]) == ((), True)


def test_only_loaders_that_are_trained_on_are_changed() -> None:
    """Not the one that is read in evaluation."""
    other = Call(kind="loader", line=CodeLine("train.py", 30), values=LOADER.values, num_passes=0)
    options = choose({"forward": 10, "data": 5}, (LOADER, other)).options
    assert make_trial(options[-1:], 40).loader_lines == (("train.py", 20),)


@pytest.mark.parametrize(
    ("model_mb", "values", "sizes"),
    [
        (60, {}, [10, 50, 100]),
        (8, {}, [10]),
        (0.5, {}, []),
        (8, {"bucket_cap_mb": 10.0, "has_small_first_bucket": False}, []),
        (8, {"bucket_cap_mb": 2.0, "has_small_first_bucket": False}, [10]),
        (300, {"bucket_cap_mb": 50.0, "has_small_first_bucket": False}, [10, 25, 100]),
    ],
)
def test_buckets_are_tried_that_divide_gradients_differently(
    model_mb: float, values: dict[str, Any], sizes: list[int]
) -> None:
    """Where the exchange is exposed; sizes that all hold the whole model are one."""
    facts = {"ddp": {"parameter_bytes": int(model_mb * 2**20), "backend": "gloo"}}
    choice = choose({"forward": 10, "communication": 5}, (change(DDP, **values),), facts)
    assert names(choice) == [f"bucket_cap_mb={size}" for size in sizes]
    assert "no_sync()" in choice.advice[0]


def test_compression_and_nccl_are_tried_if_they_can_be() -> None:
    """Compression on request; of NCCL's variables those that its library knows."""
    facts = {"ddp": {"parameter_bytes": 2**19, "backend": "nccl"}, "uses_device": True}
    shares = {"forward": 10.0, "communication": 5.0}
    assert names(choose(shares, facts=facts)) == []
    choice = choose(shares, facts=facts, compression=True, nccl_names=("NCCL_ALGO",))
    assert names(choice) == ["compression=bf16", "compression=fp16", "NCCL_ALGO=Ring", "NCCL_ALGO=Tree"]
    assert "changes the numbers" in choice.options[0].warning
    assert make_trial(choice.options[2:3], 40).environ == {"NCCL_ALGO": "Ring"}


def test_unused_parameters_threads_and_views() -> None:
    """As the script has them."""
    shares = {"forward": 10.0, "backward": 20.0}
    found = names(choose(shares, (change(DDP, find_unused_parameters=True),)))
    assert found == ["find_unused_parameters=False", "static_graph=True"]
    assert names(choose(shares, (change(DDP, gradient_as_bucket_view=False),))) == ["gradient_as_bucket_view=True"]
    choice = choose(shares, facts={"num_threads": 4, "num_cores": 4})
    assert names(choice) == ["OMP_NUM_THREADS=2", "OMP_NUM_THREADS=1"]
    trial = make_trial(choice.options[:1], 40)
    assert (trial.num_threads, trial.environ) == (2, {"OMP_NUM_THREADS": "2"})


def test_a_trial_is_read_as_it_was_written(tmp_path: Path) -> None:
    """With its lines as pairs; a run without notes has no calls."""
    trial = make_trial(choose({"forward": 10, "data": 5}).options[:1], 40)
    trial.write(tmp_path)
    assert Trial.read(tmp_path) == trial
    assert read_calls(tmp_path) == []


def test_trials_check_the_estimate_of_the_finding_that_suggests_them() -> None:
    """Small buckets are named instead of the exchange; a small batch is advice, with the size that would do."""
    small = Judged(make_finding("DDP743", summary="buckets"), 1.4)
    shares = {"forward": 10.0, "backward": 20.0, "communication": 10.0}
    for judged, code in (((small,), "DDP743"), ((), "DDP723")):
        choice = choose(shares, judged=judged)
        assert {option.code for option in choice.options if option.name == "bucket_cap_mb"} == {code}
    evidence = ("forward takes 1 ms", "from about 64 samples on each rank that is 25% of an update")
    batch = Judged(make_finding("DDP747", summary="the batch of a rank is too small", evidence=evidence), 2.31)
    advice = choose(shares, judged=(batch,)).advice
    assert len(advice) == 1
    assert advice[0].startswith("the batch of a rank is too small: from about 64 samples on each rank")
    assert "2.31x the samples in a second; not tried" in advice[0]


def test_other_interfaces_are_tried_where_gloo_takes_most_of_the_time() -> None:
    """From 30 % on, if the machine has any; NCCL has its own."""
    shares = {"forward": 10.0, "communication": 10.0}
    interfaces = ("lo", "eth0", "eth1")
    tried = [each for each in choose(shares, interfaces=interfaces).options if each.kind == "environment"]
    assert list(map(str, tried)) == ["GLOO_SOCKET_IFNAME=eth0", "GLOO_SOCKET_IFNAME=eth1"]
    assert {each.before for each in tried} == {"lo"}
    assert make_trial(tried[:1], 20).environ == {"GLOO_SOCKET_IFNAME": "eth0"}
    less = {"forward": 10.0, "communication": 3.0}
    nccl = {"ddp": {"parameter_bytes": 60 * 2**20, "backend": "nccl"}}
    for choice in (
        choose(shares, interfaces=("lo",)),
        choose(less, interfaces=interfaces),
        choose(shares, facts=nccl, interfaces=interfaces),
    ):
        assert not any(each.kind == "environment" for each in choice.options)


def test_pinned_memory_is_tried_for_data_and_for_copies_to_a_device() -> None:
    """Not on the CPU, and not where it is pinned."""
    for shares in ({"forward": 10.0, "copy": 2.0}, {"forward": 10.0, "data": 2.0}):
        found = [each for each in choose(shares, facts={"uses_device": True}).options if each.name == "pin_memory"]
        assert [each.code for each in found] == ["DDP752"]
        assert "pin_memory=True" not in names(choose(shares))
        pinned = change(LOADER, pin_memory=True)
        assert "pin_memory=True" not in names(choose(shares, (DDP, pinned), {"uses_device": True}))


def test_names_are_whole_strings_of_the_library(tmp_path: Path) -> None:
    """A name inside a message, or a part of a longer name, is none."""
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(
        b"\x7fELF\0NCCL_ALGO\0NCCL_IB_HCA\0NCCL_DEBUG set by environment\0could not read NCCL_TIMEOUT\0xNCCL_NET\0"
    )
    assert read_names(library) == {"NCCL_ALGO", "NCCL_IB_HCA"}


def test_variables_that_do_nothing_are_named() -> None:
    """Those that are set and not known, those that torch reads, and well-known ones."""
    environ = {"NCCL_TIMEOUT": "1800", "NCCL_ALGO": "Ring", "NCCL_BLOCKING_WAIT": "1", "PATH": ""}
    found = describe_unknown(frozenset({"NCCL_ALGO", "NCCL_BUFFSIZE"}), environ)
    assert found[0] == "NCCL_BLOCKING_WAIT is not read by NCCL; torch reads it as TORCH_NCCL_BLOCKING_WAIT"
    assert found[1] == "NCCL_TIMEOUT=1800 does nothing: the installed NCCL does not know the name"
    assert "NCCL_TIMEOUT" in found[2]
    assert "NCCL_BUFFER_SIZE" in found[2]
