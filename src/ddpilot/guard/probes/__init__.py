# SPDX-License-Identifier: Apache-2.0
"""Probes: note what training does, in the ranks. Imports `guard.probe`, `record`."""

PROBES: tuple[str, ...] = (
    "ddpilot.guard.probes.data.probe:DataProbe",
    "ddpilot.guard.probes.saving:SavingProbe",
    "ddpilot.guard.probes.devices:DeviceErrorProbe",
    "ddpilot.guard.probes.ddp_use:WrapProbe",
    "ddpilot.guard.probes.parameters.steps:StepProbe",
    "ddpilot.guard.probes.collectives:CollectiveProbe",
    "ddpilot.guard.probes.parameters.reduction_order:ReducedOrderProbe",
    "ddpilot.guard.probes.ddp_use:DataParallelProbe",
    "ddpilot.guard.probes.ddp_use:FrozenProbe",
)
"""Every probe, as "module:class", in the order in which `guard.hook` installs them."""
