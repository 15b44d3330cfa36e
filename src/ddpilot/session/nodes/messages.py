# SPDX-License-Identifier: Apache-2.0
"""Messages between the parent and the host process of a node, besides the events of the spawner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpilot.launching.options import LaunchOptions
from ddpilot.launching.rank_environment import NodePlacement

MAGIC = b"\0ddpilot-host\n"
"""Written by a host process before its first frame; bytes before it are output of a login shell."""


@dataclass(frozen=True, kw_only=True)
class HostHello:
    """First message of a host: what the parent needs to number ranks and to compare nodes."""

    node: str
    """Host name of the node."""
    versions: Mapping[str, str]
    """Versions of Python, torch and ddpilot."""
    num_gpus: int
    num_cores: int
    step: str
    """Slurm's id of the step that runs the host; "" if there is none."""
    has_directory: bool
    """True if the parent's working directory exists on the node."""
    master_addr: str = ""
    """On node 0: the address at which ranks of other nodes reach the store."""
    master_port: int = 0
    """On node 0: the port of the store."""


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Start the rank server. Answered by `Prepared` or `NotPrepared`."""

    options: LaunchOptions
    variables: Mapping[str, str]
    """Environment variables of the ranks, in addition to the node's own."""
    defaults: Mapping[str, str]
    """Environment variables that the node's own override."""
    placement: NodePlacement
    master_port: int
    launch_id: str
    argv: list[str]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The rank server is running. `folder`: the session's private folder on the node."""

    folder: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotPrepared:
    """The host could not start the rank server."""

    did: str
    found: str
    fix: str


@dataclass(frozen=True)
class Clock:
    """Request and answer that compare clocks: `sent_s` on the parent's, `answered_s` on the node's."""

    sent_s: float
    answered_s: float = 0.0


@dataclass(frozen=True)
class AddHooks:
    """See `RankSpawner.add_hooks`."""

    hooks: tuple[str, ...]
    variables: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class StartKernel:
    """Start a rank's process, whose kernel signs with `key`; files of the kernel begin with `stem`."""

    rank: int
    stem: str
    key: bytes
    parcel: bytes
    name: str
    restart: int


@dataclass(frozen=True)
class SignalRanks:
    """See `RankSpawner.signal`."""

    ranks: tuple[int, ...]
    number: int
    group: bool


@dataclass(frozen=True)
class FreeRanks:
    """See `RankSpawner.free`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class KernelFrames:
    """The frames of one Jupyter message, signed by its sender, in either direction."""

    rank: int
    channel: str
    frames: list[bytes]


@dataclass(frozen=True)
class SendParcel:
    """Pass the parcel of a request to `ranks`; answered by one `ParcelAnswer` for each rank that replies with one."""

    token: str
    ranks: tuple[int, ...]
    data: bytes | None


@dataclass(frozen=True)
class CloseParcel:
    """No answer of that request is expected any more."""

    token: str


@dataclass(frozen=True)
class ParcelAnswer:
    """The parcel with which a rank has replied. Sent before the rank's report."""

    token: str
    rank: int
    data: bytes


@dataclass(frozen=True)
class FileBlocks:
    """Parts of a rank's file that have changed. `size`: its size; `blocks`: by offset, the new bytes."""

    name: str
    size: int
    blocks: Mapping[int, bytes]
    is_new: bool
    """True if the file was replaced: its earlier content is gone."""


@dataclass(frozen=True)
class Ask:
    """Ask for the "stacks" or "usage" of `ranks`; answered by `Answer`."""

    number: int
    about: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """The answer to an `Ask`."""

    number: int
    value: Any = field(default=None)


@dataclass(frozen=True)
class EndHost:
    """End all ranks and the host."""
