# SPDX-License-Identifier: Apache-2.0
"""`Check`, `Outcome`, and the checks as data, the most important claims first. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from ddpilot.errors import DdpilotError, did_you_mean

Status = Literal["ok", "failed", "cannot be shown"]


class CannotBeShownError(Exception):
    """Raised if this machine lacks what the check needs; the message states what."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a check."""

    status: Status
    evidence: str
    """Observed values, in one line."""


@dataclass(frozen=True)
class Check:
    """One claim and its requirements."""

    name: str
    """Name of the check and of its function."""
    module: str
    """Module of the function, in `ddpilot.gpu_check.checks`."""
    claim: str
    _: KW_ONLY
    num_devices: int = 1
    """Number of accelerators that it requires; 0: it also runs on the CPU."""
    is_pair: bool = False
    """True if it needs two ranks on the accelerator's own backend. On a single NVIDIA device, these join NCCL as two
    hosts; the check is skipped there if `PAIR_ON_ONE_DEVICE` failed before."""
    only_cuda: bool = False
    """True if it uses the CUDA driver or a `torch.cuda` API that other accelerators do not have."""
    packages: tuple[str, ...] = ()
    """Importable names of optional packages that it requires."""
    limit_s: float = 90.0
    """Seconds after which it fails."""

    @property
    def needs(self) -> str:
        """Requirements of the check, in words."""
        if self.only_cuda:
            return "NVIDIA"
        return "any" if not self.num_devices else "a device" if self.num_devices == 1 else f"{self.num_devices} devices"


def judge(holds: bool, evidence: str) -> Outcome:
    """Return ok if the claim `holds`, otherwise failed."""
    return Outcome(status="ok" if holds else "failed", evidence=evidence)


Answer = tuple[bool, str]
"""A rank's result: True if the claim holds there, and what it observed."""


def judge_answers(answers: Iterable[Answer]) -> Outcome:
    """Return ok if the claim holds on every rank. The evidence is that of all ranks, equal texts once."""
    holds, texts = zip(*answers, strict=True)
    return judge(all(holds), " // ".join(dict.fromkeys(texts)))


PAIR_ON_ONE_DEVICE = "pair_is_formed"
"""If this check fails on a single device, the other checks with two ranks are skipped there."""

_SESSION = ("ipykernel", "jupyter_client")


def _cuda(name: str, module: str, claim: str, packages: tuple[str, ...] = ()) -> Check:
    """Return a check that requires an NVIDIA device."""
    return Check(name, module, claim, only_cuda=True, packages=packages)


def _any(name: str, module: str, claim: str, packages: tuple[str, ...] = ()) -> Check:
    """Return a check that also runs on the CPU."""
    return Check(name, module, claim, num_devices=0, packages=packages)


def _pair(name: str, module: str, claim: str, packages: tuple[str, ...] = ()) -> Check:
    """Return a check of two ranks that also runs on the CPU."""
    return Check(name, module, claim, num_devices=0, is_pair=True, packages=packages)


CHECKS: tuple[Check, ...] = (
    # The other checks depend on these.
    _cuda("no_context_at_import", "processes", "importing ddpilot and counting devices creates no CUDA context"),
    _cuda("fork_after_imports", "processes", "a fork of a process with the rank server's imports can use CUDA"),
    _cuda(
        "no_context_in_parent_or_server",
        "processes",
        "a launch creates no CUDA context in the parent or the rank server",
    ),
    _any("launch_after_device_use", "processes", "a launch works after the parent used the device"),
    _any("group_of_one", "groups", "one rank reduces device and CPU tensors; objects do not use the device"),
    _any("ddp_buckets_are_recorded", "recording", "DDP's buckets are recorded with numbers and lines"),
    _any("loop_has_the_cpus_numbers", "training", "Loop's gradients and weights in float64 are the CPU's to 1e-10"),
    _cuda("fp16_two_optimizers", "training", "with fp16 two optimizers step on gradients of the right size"),
    # Two ranks.
    _pair("pair_is_formed", "groups", "two ranks on the accelerator's own backend get right numbers"),
    _pair("ddp_buckets_of_a_pair", "recording", "two ranks record the same buckets under the same numbers"),
    _pair("collectives_are_recorded", "recording", "each collective is recorded with its name, number and line"),
    Check(
        "synchronous_collectives_are_followed",
        "recording",
        "collectives that are not asynchronous are recorded as begun until all ranks came, then as done",
        is_pair=True,
    ),
    _pair("hang_is_named", "recording", "a rank that ends early while the other waits is named within 5 s"),
    _pair("mismatch_is_named", "recording", "different collectives under one number are named within 5 s"),
    _pair("skipped_backward_is_named", "recording", "a rank that skipped its backward is named within 5 s"),
    _pair("slow_ranks_are_left_alone", "recording", "slow ranks and queued work are not reported"),
    _pair(
        "stuck_rank_is_freed",
        "groups",
        "a rank whose device waits in a collective is freed, and its next step is refused",
    ),
    _pair("first_collective_is_freed", "groups", "a rank that is stuck in the group's first collective is freed"),
    _pair("three_stuck_groups_are_freed", "groups", "three stuck communicators are aborted within 3 s"),
    _pair(
        "session_is_freed_and_rebuilt",
        "groups",
        "after one rank's error a session frees the other and rebuilds the group",
        packages=_SESSION,
    ),
    Check("memory_is_returned", "processes", "device memory of a failed rank is free within 2 s"),
    # One rank, continued.
    _any(
        "session_of_one_continues",
        "groups",
        "a session continues after an error and a stop, and frees a failed cell's tensors",
        packages=_SESSION,
    ),
    _cuda(
        "device_assert_is_survived",
        "groups",
        "after a device-side assert a session keeps variables, and a restarted rank computes",
        packages=_SESSION,
    ),
    Check("in_flight_is_followed", "recording", "eight all_reduces of 32 MiB in flight are followed to their end"),
    _any(
        "stand_in_keeps_the_context",
        "training",
        "dummy rows for a rank without samples do not break the CUDA context",
    ),
    _any("nan_stops_before_a_checkpoint", "training", "a NaN loss raises NonFiniteError and reaches no checkpoint"),
    _cuda("capture_under_guard", "training", "a CUDA graph can be captured while watch and guard are on"),
    _any(
        "loop_of_two_has_the_cpus_numbers",
        "training",
        "Loop's numbers on two ranks are the CPU's; on one device they share it",
    ),
    _any(
        "trainer_of_two_has_the_cpus_numbers",
        "training",
        "Trainer's weights on two ranks are those of a plain loop on the CPU",
    ),
    Check("resume_continues_exactly", "training", "a resumed run has the weights of one that ran through, bit for bit"),
    _any("fused_optimizer_trains", "training", "a fused optimizer under bf16 trains"),
    Check(
        "profile_has_device_times",
        "profiling",
        "a profile has the device's times, and reads them without waiting for it",
    ),
    Check("out_of_memory_is_explained", "training", "OutOfMemoryError is raised, and the memory is free after it"),
    _any("checkpoint_is_of_its_moment", "training", "a checkpoint has the values of its moment"),
    Check("checkpoint_of_two_devices", "training", "the same for a model on two devices", num_devices=2),
    Check("devices_by_uuid", "devices", "devices are distinguished, on NVIDIA's by UUID"),
    _cuda("masked_devices", "devices", "CUDA_VISIBLE_DEVICES is read as the driver reads it"),
    _cuda("mig_slices", "devices", "MIG slices are counted, and two of one GPU are known to share it"),
    Check("ranks_on_one_device", "devices", "two ranks on one device use gloo and say so"),
    _cuda("preloaded_module_is_named", "processes", "a preloaded module that touches CUDA does not break the ranks"),
    # Performance.
    _cuda("waits_of_a_step", "training", "Loop's step waits for the device never, with fp16 once"),
    _any("checkpoint_stall", "training", "saving 400 MB stops training for 0.2 of torch.save's time at most"),
    Check(
        "overhead_on_one_rank", "overhead", "watch and guard cost a 20 ms step 5 % at most on one rank", limit_s=180.0
    ),
    Check(
        "overhead_on_a_pair",
        "overhead",
        "watch and guard cost a 20 ms step 5 % at most on two ranks",
        num_devices=2,
        is_pair=True,
        limit_s=180.0,
    ),
)


def find_check(name: str) -> Check:
    """Return the check called `name`. Raises DdpilotError, with the closest name, if there is none."""
    for check in CHECKS:
        if check.name == name:
            return check
    guess = did_you_mean(name, [check.name for check in CHECKS], show=str)
    raise DdpilotError(
        "choosing checks",
        found=f"there is no check {name!r}",
        fix=f"{guess} `ddpilot gpu-check --list` lists the names".lstrip(),
    )


def choose_checks(names: Sequence[str]) -> tuple[Check, ...]:
    """Return the checks `names`, in the catalogue's order; all without names. Raises DdpilotError for unknown names."""
    wanted = {find_check(name).name for name in names}
    return tuple(check for check in CHECKS if not wanted or check.name in wanted)
