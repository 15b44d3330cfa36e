# SPDX-License-Identifier: Apache-2.0
"""`CHECKS`: every check of `ddpilot doctor`, by subject and in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ddpilot.diagnose.checks import devices, environment, filesystem, limits, live, network, versions
from ddpilot.diagnose.diagnosis import Line
from ddpilot.diagnose.facts import Answers, Facts

Needs = Literal["machine", "ranks"]


@dataclass(frozen=True)
class Check:
    """One check. `needs`: "machine" runs once on each node, "ranks" once for the job, with what all ranks reported."""

    run: Callable[[Facts], Answers]
    needs: Needs = "machine"

    @property
    def name(self) -> str:
        """The function's name."""
        return self.run.__name__

    @property
    def subject(self) -> str:
        """The module's name."""
        return self.run.__module__.rpartition(".")[2]


CHECKS = (
    Check(environment.topology),
    Check(environment.variables),
    Check(environment.combinations, "ranks"),
    Check(versions.versions, "ranks"),
    Check(versions.code, "ranks"),
    Check(versions.driver, "ranks"),
    Check(devices.devices),
    Check(devices.one_device_per_rank, "ranks"),
    Check(devices.compute_mode),
    Check(devices.memory_in_use),
    Check(devices.health),
    Check(devices.peer_access),
    Check(limits.shared_memory),
    Check(limits.open_files),
    Check(limits.locked_memory),
    Check(limits.memory),
    Check(limits.cores),
    Check(network.host_name),
    Check(network.master_address),
    Check(network.master_port),
    Check(network.interfaces),
    Check(network.reach),
    Check(network.stale_processes),
    Check(filesystem.checkpoint_space),
    Check(filesystem.checkpoint_write),
    Check(filesystem.atomic_rename),
    Check(live.joined, "ranks"),
    Check(live.values, "ranks"),
    Check(live.threads, "ranks"),
    Check(live.all_reduce_speed, "ranks"),
    Check(live.pair_speed, "ranks"),
)


def run_checks(facts: Facts, needs: Sequence[Needs]) -> Iterator[Line]:
    """Run the checks that need one of `needs`, and yield their lines."""
    for check in CHECKS:
        if check.needs in needs:
            for answer in check.run(facts):
                yield Line(check=check.name, subject=check.subject, answer=answer)
