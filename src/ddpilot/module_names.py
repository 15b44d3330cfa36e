# SPDX-License-Identifier: Apache-2.0
"""Every module, function and file of this package that is named in a string, except for public names and entry points.

Such names are resolved in other processes, or compared with the paths in stack traces, so that no import fails when one
of them moves. `tests/unit/test_module_names.py` resolves each.
"""

from __future__ import annotations

RECORD_HOOK = "ddpilot.record.hook:start"
"""Called in every rank before its process group exists, as are all hooks: starts the flight recorder."""
GUARD_HOOK = "ddpilot.guard.hook:start"
"""Installs the probes of guard; after `RECORD_HOOK`, whose recording they add to."""

GUARD_PROBES = (
    "ddpilot.guard.probes.data.probe:DataProbe",
    "ddpilot.guard.probes.saving:SavingProbe",
    "ddpilot.guard.probes.devices:DeviceErrorProbe",
    "ddpilot.guard.probes.ddp_use:WrapProbe",
    "ddpilot.guard.probes.parameters.steps:StepProbe",
    "ddpilot.guard.probes.collectives:CollectiveProbe",
    "ddpilot.guard.probes.parameters.reduction_order:ReducedOrderProbe",
    "ddpilot.guard.probes.ddp_use:DataParallelProbe",
)
"""Every probe, in the order in which they are installed."""

UPDATE_HOOK = "ddpilot.diagnose.updates.hook:start"
"""Records what the updates of a program compute, for `verify` and the doctor of a script."""
UPDATE_PROBE = "ddpilot.diagnose.updates.probe:UpdateProbe"

PROFILE_HOOK = "ddpilot.profiler.rank.hook:start"
"""Records where the time of updates goes."""
PROFILE_PROBE = "ddpilot.profiler.rank.probe:PhaseProbe"
TRIAL_HOOK = "ddpilot.profiler.rank.overrides:start"
"""Overrides what a script passes to DDP and to its loaders, for `ddpilot tune`."""
NVTX_PROBE = "ddpilot.profiler.rank.tracing:NvtxProbe"

LAUNCHER = "ddpilot.launcher"
RANK_SERVER = "ddpilot.launching.rank_server.server"
NODE_REPORT = "ddpilot.slurm.node_report"
"""Run by srun on each node of a job, for what the watch there knows."""
FUNCTION_RANK = "ddpilot.slurm.function_rank"
"""Run by srun for each rank of a function that was submitted as a job."""
FORKED_RANK = "ddpilot.launching.rank_server.rank"
RANK_JOB = "ddpilot.launching.rank_server.job"
SPAWNED_MAIN = "ddpilot.launching.rank_server.spawned_main"
"""The ``__main__`` of DataLoader workers that are not forked."""
RECORD_PREFORK = "ddpilot.record.prefork"
GROUP_TEARDOWN = "ddpilot.group.teardown"

SESSION_HOST = "ddpilot.session.host.main"
"""Runs on each node of a session on several machines."""
SESSION_KERNEL = "ddpilot.session.rank.kernel"
SESSION_MAIN = "ddpilot.session.rank.main"
SESSION_PRELOAD = "ddpilot.session.rank.preload"
SESSION_STREAM = "ddpilot.session.rank.main.RankStream"

TRAINER_PRELOAD = ("torch._dynamo", "ddpilot.trainer.trainer")
"""Imported before ranks are forked: each rank would otherwise import them in every fit (3 s, mostly Dynamo, which every
torch optimizer imports when it is created)."""
FASTAI_PRELOAD = "ddpilot.integrations.fastai.preload"
LIGHTNING_PRELOAD = "ddpilot.integrations.lightning.preload"

OBSERVER_PROCESS = "ddpilot.watch.external.observer_process"
GPU_CHECK_CHILD = "ddpilot.gpu_check.child"
GPU_CHECKS = "ddpilot.gpu_check.checks"

INIT_GROUP = "ddpilot:init_group"
LAUNCH = "ddpilot:launch"
"""Public functions whose calls `ddpilot lint` knows."""

GUARD_FOLDER = "/ddpilot/guard/"
GROUP_FOLDER = "/ddpilot/group/"
FORM_GROUP = "/ddpilot/group/creation.py:form_group"
JOIN_GROUP = "/ddpilot/group/creation.py:join_group"
WAIT_FOR_PEERS = "/ddpilot/group/teardown.py:wait_for_peers"
RECORDED_KERNELS = "/ddpilot/record/collectives/start_stop.py"
SESSION_REQUESTS = "/ddpilot/session/rank/requests.py"
