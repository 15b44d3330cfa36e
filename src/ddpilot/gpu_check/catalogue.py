# SPDX-License-Identifier: Apache-2.0
"""`Check`, `Outcome`, and the checks as data, the most important claims first. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """What was observed, with values, in one line."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim and its requirements."""

    name: str
    """Name of the check and of its function."""
    module: str
    """Module of the function, in `ddpilot.gpu_check.checks`."""
    claim: str
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
        """What the check requires, in words."""
        if self.only_cuda:
            return "NVIDIA"
        return "any" if not self.num_devices else "a device" if self.num_devices == 1 else f"{self.num_devices} devices"


def judge(holds: bool, evidence: str) -> Outcome:
    """Return ok if the claim `holds`, otherwise failed."""
    return Outcome(status="ok" if holds else "failed", evidence=evidence)


PAIR_ON_ONE_DEVICE = "pair_is_formed"
"""If this check fails on a single device, the other checks with two ranks are skipped there."""

_SESSION = ("ipykernel", "jupyter_client")

CHECKS: tuple[Check, ...] = (
    # If these fail, the others mean little.
    Check(
        name="no_context_at_import",
        module="processes",
        claim="importing ddpilot and counting devices creates no CUDA context",
        only_cuda=True,
    ),
    Check(
        name="fork_after_imports",
        module="processes",
        claim="a fork of a process with the rank server's imports can use CUDA",
        only_cuda=True,
    ),
    Check(
        name="no_context_in_parent_or_server",
        module="processes",
        claim="a launch creates no CUDA context in the parent or the rank server",
        only_cuda=True,
    ),
    Check(
        name="launch_after_device_use",
        module="processes",
        claim="a launch works after the parent used the device",
        num_devices=0,
    ),
    Check(
        name="group_of_one",
        module="groups",
        claim="one rank reduces device and CPU tensors; objects do not use the device",
        num_devices=0,
    ),
    Check(
        name="ddp_buckets_are_recorded",
        module="recording",
        claim="DDP's buckets are recorded with numbers and lines",
        num_devices=0,
    ),
    Check(
        name="loop_has_the_cpus_numbers",
        module="training",
        claim="Loop's gradients and weights in float64 are the CPU's to 1e-10",
        num_devices=0,
    ),
    Check(
        name="fp16_two_optimizers",
        module="training",
        claim="with fp16 two optimizers step on gradients of the right size",
        only_cuda=True,
    ),
    # Two ranks.
    Check(
        name="pair_is_formed",
        module="groups",
        claim="two ranks on the accelerator's own backend get right numbers",
        num_devices=0,
        is_pair=True,
    ),
    Check(
        name="ddp_buckets_of_a_pair",
        module="recording",
        claim="two ranks record the same buckets under the same numbers",
        num_devices=0,
        is_pair=True,
    ),
    Check(
        name="collectives_are_recorded",
        module="recording",
        claim="each collective is recorded with its name, number and line",
        num_devices=0,
        is_pair=True,
    ),
    Check(
        name="synchronous_collectives_are_followed",
        module="recording",
        claim="collectives that are not asynchronous are recorded as begun until all ranks came, then as done",
        is_pair=True,
    ),
    Check(
        name="hang_is_named",
        module="recording",
        claim="a rank that ends early while the other waits is named within 5 s",
        num_devices=0,
        is_pair=True,
    ),
    Check(
        name="mismatch_is_named",
        module="recording",
        claim="different collectives under one number are named within 5 s",
        num_devices=0,
        is_pair=True,
    ),
    Check(
        name="skipped_backward_is_named",
        module="recording",
        claim="a rank that skipped its backward is named within 5 s",
        num_devices=0,
        is_pair=True,
    ),
    Check(
        name="slow_ranks_are_left_alone",
        module="recording",
        claim="slow ranks and queued work are no finding",
        num_devices=0,
        is_pair=True,
    ),
    Check(
        name="stuck_rank_is_freed",
        module="groups",
        claim="a rank whose device waits in a collective is freed, and its next step is refused",
        num_devices=0,
        is_pair=True,
    ),
    Check(
        name="first_collective_is_freed",
        module="groups",
        claim="a rank that is stuck in the group's first collective is freed",
        num_devices=0,
        is_pair=True,
    ),
    Check(
        name="three_stuck_groups_are_freed",
        module="groups",
        claim="three stuck communicators are aborted within 3 s",
        num_devices=0,
        is_pair=True,
    ),
    Check(
        name="session_is_freed_and_rebuilt",
        module="groups",
        claim="after one rank's error a session frees the other and rebuilds the group",
        num_devices=0,
        is_pair=True,
        packages=_SESSION,
    ),
    Check(
        name="memory_is_returned",
        module="processes",
        claim="device memory of a failed rank is free within 2 s",
    ),
    # One rank, continued.
    Check(
        name="session_of_one_continues",
        module="groups",
        claim="a session continues after an error and a stop, and frees a failed cell's tensors",
        num_devices=0,
        packages=_SESSION,
    ),
    Check(
        name="device_assert_is_survived",
        module="groups",
        claim="after a device-side assert a session keeps variables, and a restarted rank computes",
        only_cuda=True,
        packages=_SESSION,
    ),
    Check(
        name="in_flight_is_followed",
        module="recording",
        claim="eight all_reduces of 32 MiB in flight are followed to their end",
    ),
    Check(
        name="stand_in_keeps_the_context",
        module="training",
        claim="made-up rows for a rank without samples do not break the CUDA context",
        num_devices=0,
    ),
    Check(
        name="nan_stops_before_a_checkpoint",
        module="training",
        claim="a NaN loss raises NonFiniteError and reaches no checkpoint",
        num_devices=0,
    ),
    Check(
        name="capture_under_guard",
        module="training",
        claim="a CUDA graph can be captured while watch and guard are on",
        only_cuda=True,
    ),
    Check(
        name="loop_of_two_has_the_cpus_numbers",
        module="training",
        claim="Loop's numbers on two ranks are the CPU's; on one device they share it",
        num_devices=0,
    ),
    Check(
        name="trainer_of_two_has_the_cpus_numbers",
        module="training",
        claim="Trainer's weights on two ranks are those of a plain loop on the CPU",
        num_devices=0,
    ),
    Check(
        name="resume_continues_exactly",
        module="training",
        claim="a resumed run has the weights of one that ran through, bit for bit",
    ),
    Check(
        name="fused_optimizer_trains",
        module="training",
        claim="a fused optimizer under bf16 trains",
        num_devices=0,
    ),
    Check(
        name="out_of_memory_is_explained",
        module="training",
        claim="OutOfMemoryError is raised, and the memory is free after it",
    ),
    Check(
        name="checkpoint_is_of_its_moment",
        module="training",
        claim="a checkpoint has the values of its moment",
        num_devices=0,
    ),
    Check(
        name="checkpoint_of_two_devices",
        module="training",
        claim="the same for a model on two devices",
        num_devices=2,
    ),
    Check(
        name="devices_by_uuid",
        module="devices",
        claim="devices are told apart, on NVIDIA's by UUID",
    ),
    Check(
        name="masked_devices",
        module="devices",
        claim="CUDA_VISIBLE_DEVICES is read as the driver reads it",
        only_cuda=True,
    ),
    Check(
        name="mig_slices",
        module="devices",
        claim="MIG slices are counted, and two of one GPU are known to share it",
        only_cuda=True,
    ),
    Check(
        name="ranks_on_one_device",
        module="devices",
        claim="two ranks on one device use gloo and say so",
    ),
    Check(
        name="preloaded_module_is_named",
        module="processes",
        claim="a preloaded module that touches CUDA does not break the ranks",
        only_cuda=True,
    ),
    # Performance.
    Check(
        name="waits_of_a_step",
        module="training",
        claim="Loop's step waits for the device never, with fp16 once",
        only_cuda=True,
    ),
    Check(
        name="checkpoint_stall",
        module="training",
        claim="saving 400 MB stops training for 0.2 of torch.save's time at most",
        num_devices=0,
    ),
    Check(
        name="overhead_on_one_rank",
        module="overhead",
        claim="watch and guard cost a 20 ms step 5 % at most on one rank",
        limit_s=180.0,
    ),
    Check(
        name="overhead_on_a_pair",
        module="overhead",
        claim="watch and guard cost a 20 ms step 5 % at most on two ranks",
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
        fix=f"{guess} `ddpilot gpu-check --list` shows their names".lstrip(),
    )


def choose_checks(names: Sequence[str]) -> tuple[Check, ...]:
    """Return the checks `names`, in the catalogue's order; all without names. Raises DdpilotError for unknown names."""
    wanted = {find_check(name).name for name in names}
    return tuple(check for check in CHECKS if not wanted or check.name in wanted)
