# SPDX-License-Identifier: Apache-2.0
"""`SessionOptions`: the options of a session, validated on construction."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpilot.errors import LaunchError
from ddpilot.launching.options import LaunchOptions
from ddpilot.output.writer import Output
from ddpilot.watch.options import OnFinding, WatchOptions

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def choose_visible(gpus: Sequence[int], visible: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for `gpus`, which index the devices listed in `visible` (None: variable not set).

    An index beyond the list is kept as it is; counting the devices later reports that there is no such GPU.
    """
    listed = [] if visible is None else [item.strip() for item in visible.split(",")]
    return ",".join(str(gpu) if visible is None or gpu >= len(listed) else listed[gpu] for gpu in gpus)


@dataclass(frozen=True, kw_only=True)
class SessionOptions(WatchOptions):
    """Options of a session, in addition to those of `WatchOptions`.

    Raises LaunchError for invalid values.
    """

    nproc_per_node: int | str = "auto"
    """Number of ranks. "auto": one per GPU in `gpus`, else per visible GPU, else 1; "gpu" and "cpu" as in
    `Launcher`."""

    hosts: tuple[str, ...] = ()
    """Machines on which the ranks run, named as for `ssh`. Each gets `nproc_per_node` ranks, in this order. (): this
    machine."""

    slurm: bool = False
    """True: run the ranks on nodes of a Slurm cluster. Inside a job these are the job's nodes. Elsewhere `salloc`
    requests nodes, which are released when the session ends."""

    nodes: int | None = None
    """With `slurm`: number of nodes; None: all nodes of this job, or one."""

    gpus_per_node: int | None = None
    """With `slurm`: number of GPUs to request on each node. If `nproc_per_node` is "auto", it is also the number of
    ranks."""

    slurm_options: Mapping[str, str] = field(default_factory=dict)
    """With `slurm`: more options of `salloc` by name, such as {"time": "2:00:00", "account": "x", "exclusive": ""}."""

    gpus: tuple[int, ...] = ()
    """Indices of the GPUs that the ranks may use, as in `torch.device("cuda", n)` of this process: with
    CUDA_VISIBLE_DEVICES=2,3 index 0 is the machine's GPU 2. (): all visible GPUs."""

    backend: str | None = None
    """Backend of the process group ("gloo", "nccl", "cpu:gloo,cuda:nccl"); None: chosen for the device."""

    seed: int | None = None
    """Seed for `random`, torch and numpy, the same on every rank; None: a random seed, different on every rank."""

    apps: tuple[str, ...] = ()
    """Names of apps that prepare a training library on every rank, such as "fastai"."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks, in addition to the parent's."""

    preload: tuple[str, ...] = ()
    """Modules to import once, before the ranks are forked."""

    respawn: bool = False
    """Restart dead ranks automatically: after the cell in which they died, or before the next cell if none was
    running."""

    keep_cache: bool = False
    """Keep the GPU's memory cache between cells. By default it is emptied after a cell that failed, and if the unused
    part of it is more than an eighth of the GPU's memory."""

    verbose: bool = False
    """Let apps print more about what they change."""

    output: Output = "labelled"
    """"labelled": all output, each line prefixed with its rank; "rank_zero": output of rank 0 only; "silent": none."""

    output_limit_bytes: int | None = None
    """Maximum bytes to show of each rank's output per cell; None: 1 MB in a notebook, else no limit."""

    on_finding: OnFinding = "report"
    """"report": show findings and let the cell continue; "stop": an error ends the cell, the group is rebuilt and all
    variables are kept. A function is called with each finding and ends the cell by returning "stop"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        gpus: object = self.gpus
        if not isinstance(gpus, tuple) or not all(isinstance(gpu, int) and gpu >= 0 for gpu in gpus):
            raise LaunchError("reading `gpus`", found=f"{gpus!r}", fix="Give numbers of GPUs, such as `gpus=(0, 1)`")
        if self.gpus and isinstance(self.nproc_per_node, int) and self.nproc_per_node > len(self.gpus):
            raise LaunchError(
                "reading `nproc_per_node`",
                found=f"{self.nproc_per_node} ranks for {len(self.gpus)} GPUs in `gpus`",
                fix="Ask for at most one rank per GPU, or leave `gpus` out to share them",
            )
        self._check_hosts()
        apps: object = self.apps
        if isinstance(apps, str):
            raise LaunchError("reading `apps`", found=f"{apps!r}", fix=f"Write `apps=({apps!r},)`")
        seed: object = self.seed
        if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**63):
            raise LaunchError("reading `seed`", found=f"{self.seed!r}", fix="Give a number from 0 to 2**63 - 1")
        self.launch_options()

    @property
    def is_remote(self) -> bool:
        """True if the ranks run on other machines."""
        return bool(self.hosts) or self.slurm

    def _check_hosts(self) -> None:
        hosts: Any = self.hosts
        if isinstance(hosts, str):
            raise LaunchError("reading `hosts`", found=f"{hosts!r}", fix=f"Write `hosts=({hosts!r},)`")
        for host in hosts:
            if not isinstance(host, str) or not host or host.startswith("-") or host.split() != [host]:
                raise LaunchError(
                    "reading `hosts`", found=f"{host!r}", fix="Give names of machines, as `ssh` takes them"
                )
        self._check_slurm()
        if self.is_remote and self.gpus:
            raise LaunchError(
                "reading `gpus`",
                found=f"{self.gpus!r}, which numbers the GPUs of this machine, for ranks on other machines",
                fix='Set `env={"CUDA_VISIBLE_DEVICES": "0,1"}`, which applies to each of them',
            )

    def _check_slurm(self) -> None:
        if self.slurm and self.hosts:
            raise LaunchError("reading `hosts`", found="both `hosts` and `slurm`", fix="Leave one of them out")
        for name, value in (("nodes", self.nodes), ("gpus_per_node", self.gpus_per_node)):
            if value is None:
                continue
            number: object = value
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise LaunchError(f"reading `{name}`", found=f"{value!r}", fix="Give a number from 1")
            if not self.slurm:
                raise LaunchError(
                    f"reading `{name}`",
                    found=f"{value}, without `slurm`",
                    fix="Add `slurm=True`, in a notebook `--slurm`, or name machines with `hosts`",
                )
        options: Any = self.slurm_options
        if not isinstance(options, Mapping) or not all(
            isinstance(each, str) for pair in options.items() for each in pair
        ):
            found = f"{options!r:.100}"
            raise LaunchError("reading `slurm_options`", found=found, fix='Give texts, such as {"time": "2:00:00"}')
        if self.slurm_options and not self.slurm:
            fix = "Add `slurm=True`, in a notebook `--slurm`; without it ranks run on this machine"
            raise LaunchError("reading `slurm_options`", found=f"{options!r:.100}, without `slurm`", fix=fix)
        own = {"nodes", "gpus-per-node", "ntasks", "ntasks-per-node", "no-shell"} & {*self.slurm_options}
        if own:
            name = sorted(own)[0]
            fix = "Leave it out; `nodes`, `gpus_per_node` and `nproc_per_node` are options of the session"
            raise LaunchError("reading `slurm_options`", found=f"`{name}`, which the session sets itself", fix=fix)

    def launch_options(self) -> LaunchOptions:
        """Return the options for starting the processes."""
        given = {**os.environ, **self.env}.get(_VISIBLE) if self.gpus else None
        visible = {_VISIBLE: choose_visible(self.gpus, given)} if self.gpus else {}
        nproc = self.nproc_per_node
        return LaunchOptions(
            nproc_per_node=self.gpus_per_node if nproc == "auto" and self.gpus_per_node is not None else nproc,
            backend=self.backend,
            env={**self.env, **visible} if visible else self.env,
            preload=self.preload,
            output=self.output,
            output_limit_bytes=self.output_limit_bytes,
        )
