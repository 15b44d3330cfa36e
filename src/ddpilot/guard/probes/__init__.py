# SPDX-License-Identifier: Apache-2.0
"""The probes, one module per aspect of training."""

PROBES: tuple[str, ...] = (
    "ddpilot.guard.probes.data.probe:DataProbe",
    "ddpilot.guard.probes.saving:SavingProbe",
    "ddpilot.guard.probes.device_errors:DeviceErrorProbe",
    "ddpilot.guard.probes.wraps:WrapProbe",
    "ddpilot.guard.probes.steps:StepProbe",
    "ddpilot.guard.probes.collectives:CollectiveProbe",
    "ddpilot.guard.probes.reduced_order:ReducedOrderProbe",
    "ddpilot.guard.probes.data_parallel:DataParallelProbe",
    "ddpilot.guard.probes.frozen:FrozenProbe",
)
"""Every probe, as "module:class", in the order in which `guard.hook` installs them."""
