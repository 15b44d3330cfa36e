# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of all ranks: rank 0 writes, and an error on one rank is raised on all of them.

The ranks' parts are gathered on rank 0 before anything is written. A checkpoint is therefore complete from the start,
on any file system, and never waits for a file of a rank that has died. Shards of parameters are not gathered: each rank
writes its own into the same directory, if all ranks see it (`RankWrite`).
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from ddpilot.checkpoint.atomic_files import FileFacts, RankWrite, collect
from ddpilot.checkpoint.directory import CheckpointDir, as_os_error
from ddpilot.checkpoint.format import Checkpoint, StagedSave
from ddpilot.checkpoint.host_copy import HostCopy
from ddpilot.checkpoint.manifest import RunProgress
from ddpilot.checkpoint.weights import find_checkpoint, match_weights, read_weights
from ddpilot.errors import CheckpointError, CorruptCheckpointError
from ddpilot.group.device import capture_rng, is_out_of_memory
from ddpilot.group.protocol import GroupLike

if TYPE_CHECKING:
    from ddpilot.checkpoint.shard_files import ShardReader

Value = TypeVar("Value")

RNG = "rng"
"""Key of a rank's random states in its part."""


class CollectiveCheckpoints:
    """The checkpoints of a run, for all ranks of `group`; only rank 0 writes to `folder`."""

    def __init__(self, group: GroupLike, folder: CheckpointDir) -> None:
        self.folder = folder
        self._group = group
        self._host_copy = HostCopy()
        self._shard_copy = HostCopy()
        self._writing: Future[None] | None = None
        self._can_share: bool | None = None

    def __repr__(self) -> str:
        return f"CollectiveCheckpoints({self.folder.where!r})"

    def check_writable(self) -> None:
        """Raise CheckpointError on every rank if rank 0 cannot write to the directory. Collective."""
        self._on_rank_zero(self.folder.check_writable)

    def set_aside(self) -> Path | str | None:
        """Call `CheckpointDir.set_aside` on rank 0 and return its result on all ranks. Collective."""
        return self._on_rank_zero(self.folder.set_aside)

    def save(
        self,
        progress: RunProgress,
        *,
        weights: Mapping[str, Mapping[str, torch.Tensor]],
        state: Mapping[str, Any] | None = None,
        part: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        shards: Mapping[tuple[str, ...], torch.Tensor] | None = None,
    ) -> None:
        """Save a checkpoint as `CheckpointDir.save` does, with every rank's random states. Collective.

        - `weights`, `state`, `metrics`: those of rank 0 are saved.
        - `part`: the state of this rank.
        - `shards`: sharded tensors by their paths, and on rank 0 whole ones next to them. Ranks write them in the
          background; only if `can_share`.

        Returns on all ranks once all copies are in CPU memory. Raises CheckpointError on every rank if one of them has
        values that cannot be saved. Rank 0 reports disk errors, which do not stop training.
        """
        if shards:
            self._on_rank_zero(self.folder.wait)  # the copies that are written would be overwritten
            if self._writing is not None:
                self._writing.result()
        own: CheckpointError | OSError | tuple[dict[str, Any], Any]
        copied: dict[str, torch.Tensor] = {}
        try:
            own = self._host_copy.take({RNG: capture_rng(self._group.device), **(part or {})}), None
            if shards:
                from ddpilot.checkpoint.shard_files import join_plans, local_shards, plan_own  # slow to import

                own = own[0], plan_own(shards)
                copied = self._shard_copy.take(local_shards(shards))
        except Exception as error:  # noqa: BLE001  (whatever it is, all ranks raise it)
            own = self._explain_copy(error, may_continue=bool(shards))
        outcomes: list[Any] = self._group.all_gather_object(own) if self._group.world_size > 1 else [own]
        _raise_first(outcomes)
        if self._note_failure(outcomes):
            return
        parts, plans = map(list, zip(*outcomes, strict=True))
        staged = None
        if shards:
            joined = join_plans(plans, self._group.rank)
            staged = self._stage(progress)
            if staged is None or not self._begin_shards(staged, joined, copied):
                return
        saved = staged if isinstance(staged, StagedSave) else None
        self._on_rank_zero(
            lambda: self.folder.save(progress, weights=weights, state=state, parts=parts, metrics=metrics, staged=saved)
        )

    def can_share(self) -> bool:
        """True if all ranks see the directory of rank 0 and can lock files there, so that each can write. Collective.

        Determined at the first call.
        """
        if self._can_share is None:
            probe = self._on_rank_zero(lambda: self.folder.path / f".probe-{secrets.token_hex(4)}")
            self._on_rank_zero(lambda: probe.mkdir(parents=True))
            failure = self._try_lock(probe)
            failures = self._group.all_gather_object(failure)
            self._on_rank_zero(lambda: shutil.rmtree(probe, ignore_errors=True))
            self._can_share = not any(failures)
            if not self._can_share and self._group.is_rank_zero:
                named = [str(rank) for rank, failure in enumerate(failures) if failure]
                ranks = f"rank{'s' * (len(named) > 1)} {', '.join(named)}"
                self.folder.report(
                    f"{ranks} cannot write in {self.folder.path} of rank 0 ({next(filter(None, failures))}), so "
                    "rank 0 gathers the whole state for each checkpoint. Use a directory that all machines share."
                )
        return self._can_share

    def _try_lock(self, folder: Path) -> str:
        try:
            RankWrite(folder, self._group.rank).release()
        except OSError as error:
            return str(error.strerror or error)
        return ""

    def _stage(self, progress: RunProgress) -> StagedSave | Path | None:
        """Return the directory in which all ranks write, on rank 0 as it publishes it; None after an error."""
        staged = None

        def stage() -> Path | None:
            nonlocal staged
            staged = self.folder.stage(progress)
            return None if staged is None else staged.path

        path = self._on_rank_zero(stage)
        return staged or path

    def _begin_shards(
        self, staged: StagedSave | Path, joined: tuple[Any, Any], copied: Mapping[str, torch.Tensor]
    ) -> bool:
        """Begin to write the shards of a rank other than 0, and let rank 0 wait for them. False after an error."""
        from ddpilot.checkpoint.shard_files import finish_shards, load_plain, write_shards

        (plan, metadata), own, failure = joined, None, None
        try:
            if isinstance(staged, Path):
                own = RankWrite(staged, self._group.rank)
        except OSError as error:
            failure = self._with_rank(error)
        if self._note_failure(self._group.all_gather_object(failure)):
            if isinstance(staged, StagedSave):
                staged.remove()
            if own is not None:
                own.release()
            return False
        if isinstance(staged, StagedSave):
            folder, num_ranks = staged.path, self._group.world_size

            def write() -> dict[str, FileFacts]:
                files, results = write_shards(folder, plan, copied)
                others = list(collect(folder, num_ranks, load_plain))
                for more, _ in others:
                    files |= more
                return files | finish_shards(folder, metadata, [results, *(one for _, one in others)])

            staged.write_shards = write
        elif own is not None:
            self._writing = own.start(lambda: write_shards(staged, plan, copied))
        return True

    def _note_failure(self, outcomes: Sequence[object]) -> bool:
        """True if one of `outcomes` of the ranks is an OSError, which rank 0 reports: training continues."""
        failed = next((one for one in outcomes if isinstance(one, OSError)), None)
        if failed is not None and self._group.is_rank_zero:
            self.folder.note_failure(failed)
        return failed is not None

    def _explain_copy(self, error: Exception, *, may_continue: bool) -> CheckpointError | OSError:
        """Return an OSError if there was no memory for a copy and training may continue, else a CheckpointError."""
        if may_continue and (isinstance(error, OSError) or is_out_of_memory(error)):
            return self._with_rank(error if isinstance(error, OSError) else as_os_error(error))
        made = _as_checkpoint_error("copying this rank's part of a checkpoint", error, self._group)
        made.rank = self._group.rank
        return made

    def _with_rank(self, error: OSError) -> OSError:
        return OSError(error.errno, f"rank {self._group.rank}: {error.strerror}")

    def wait(self) -> bool:
        """Wait until rank 0 has written. True, on every rank, if the last save is on disk. Collective."""
        return self._on_rank_zero(self.folder.wait)

    def wait_uploaded(self) -> bool:
        """Wait until rank 0 has written and uploaded. True, on every rank, if the last save is there. Collective."""
        return self._on_rank_zero(self.folder.wait_uploaded)

    def latest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, the same on every rank; None if there is none. Collective.

        Rank 0 verifies it, and the other ranks check that they read the same checkpoint. From a URL, each node
        downloads it once. Raises CheckpointError on every rank if one of them cannot read it.
        """
        chosen = self._on_rank_zero(self.folder.latest)
        if chosen is None:
            return None
        own, failure = self._open_same(chosen)
        _raise_first(self._group.all_gather_object(failure))
        return own

    def _open_same(self, chosen: Checkpoint) -> tuple[Checkpoint | None, CheckpointError | None]:
        if self._group.is_rank_zero:
            return chosen, None
        try:
            own = self.folder.open_same(chosen)
        except CorruptCheckpointError as error:
            found = f"this rank cannot read it: {error.found}"
        except CheckpointError as error:  # its download failed
            error.rank = self._group.rank
            return None, error
        except Exception as error:  # noqa: BLE001  (whatever it is, all ranks raise it)
            return None, _as_checkpoint_error(f"using {self.folder.where}", error, self._group)
        else:
            if own.manifest.checksum == chosen.manifest.checksum:
                return own, None
            found = "this rank sees a different checkpoint under that name"
        return None, CheckpointError(
            f"opening the checkpoint that rank 0 found, {self.folder.path / chosen.path.name}",
            found=found,
            fix="Every rank has to see the same directory: use a file system that all machines share.",
            rank=self._group.rank,
        )

    def _on_rank_zero(self, call: Callable[[], Value]) -> Value:
        # An error on rank 0 alone would leave the other ranks waiting in the next collective.
        outcome: list[Any] = [None, None]
        if self._group.is_rank_zero:
            try:
                outcome[0] = call()
            except CheckpointError as error:
                outcome[1] = error
            except Exception as error:  # noqa: BLE001  (whatever it is, all ranks raise it)
                outcome[1] = _as_checkpoint_error(f"using {self.folder.where}", error, self._group)
        own_failure = outcome[1]
        value, failure = self._group.broadcast_object(outcome) if self._group.world_size > 1 else outcome
        _raise_first([own_failure or failure])  # its own error has the cause
        return cast(Value, value)


def load_jointly(model: nn.Module, path: str | os.PathLike[str], name: str, group: GroupLike) -> None:
    """Run `load_weights` on all ranks, or on none if one fails. Collective. Raises its errors, on every rank."""
    matched = on_all_ranks(group, lambda: match_weights(model, read_weights(path, name), source=os.fspath(path)))
    model.load_state_dict(matched)


def load_shards_jointly(
    model: nn.Module,
    path: str | os.PathLike[str],
    name: str,
    group: GroupLike,
    load: Callable[[dict[str, Any]], object],
    read: Callable[[nn.Module, str, dict[str, Any], ShardReader], object],
) -> None:
    """Load weights into a model whose parameters are sharded, as `load_jointly` does.

    `load`: loads a whole state_dict. `read`: reads this rank's shards of a checkpoint that has shards.
    """

    def match() -> tuple[dict[str, Any], ShardReader | None]:
        found = find_checkpoint(path)
        shards = None if found is None else found.shards()
        outlined = {} if shards is None else shards.outlined_weights(name)
        weights = outlined or (read_weights(path, name) if found is None else found.weights(name))
        return match_weights(model, weights, source=os.fspath(path)), shards if outlined else None

    matched, shards = on_all_ranks(group, match)
    if shards is None:
        load(matched)
    else:
        on_all_ranks(group, lambda: read(model, name, matched, shards))


def on_all_ranks(group: GroupLike, call: Callable[[], Value]) -> Value:
    """Return the result of `call` on every rank; an exception on one rank is raised on all, as CheckpointError.

    Collective.
    """
    value, failure = None, None
    try:
        value = call()
    except Exception as error:  # noqa: BLE001  (whatever it is, all ranks raise it)
        failure = _as_checkpoint_error("using a checkpoint", error, group)
        failure.rank = group.rank if group.world_size > 1 else None
    failures = group.all_gather_object(failure)
    _raise_first([failure, *failures])  # its own error has the cause
    return cast(Value, value)


def _as_checkpoint_error(did: str, error: Exception, group: GroupLike) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    found = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    made = CheckpointError(did, found=found, rank=group.rank)
    made.__cause__ = error
    return made


def _raise_first(outcomes: Sequence[object]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, CheckpointError):
            raise outcome
