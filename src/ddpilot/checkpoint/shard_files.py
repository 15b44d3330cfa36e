# SPDX-License-Identifier: Apache-2.0
"""Shards of tensors in a checkpoint, in the format of torch.distributed.checkpoint (DCP): one file for each rank.

Imported only where a checkpoint has shards: torch's package is slow to import. Planning, writing and reading are driven
here instead of by `dcp.save`, which is collective from its first to its last line: here a rank writes and reads alone.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.tensor import DTensor

from ddpilot.checkpoint.atomic_files import SHARDS_FILE, FileFacts, HashingFile, shard_owner
from ddpilot.errors import CorruptCheckpointError

TensorPath = tuple[str, ...]
"""Where a tensor belongs: (model, parameter), or (optimizer, "state", number of the parameter, name)."""


def key_of(path: TensorPath) -> str:
    """Return the name of a tensor in the files, as DCP flattens nested dicts."""
    return ".".join(path)


def local_shards(tensors: Mapping[TensorPath, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's part of each tensor, which shares its memory, by name."""
    return {
        key_of(path): tensor.to_local() if isinstance(tensor, DTensor) else tensor for path, tensor in tensors.items()
    }


def plan_own(tensors: Mapping[TensorPath, torch.Tensor]) -> SavePlan:
    """Return the plan of what this rank writes: its shards, and all of each tensor that is not sharded."""
    named = {key_of(path): tensor.detach() for path, tensor in tensors.items()}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(named)
    plan = planner.create_local_plan()
    # Before torch 2.8, the offset of an empty shard is that of a shard of another rank, which DCP drops then.
    items = [item for item in plan.items if named[item.index.fqn].numel() == 0 or _has_elements(item)]
    return dataclasses.replace(plan, items=items, planner_data={key_of(path): path for path in tensors})


def join_plans(plans: Sequence[SavePlan], rank: int) -> tuple[SavePlan, Metadata]:
    """Return what `rank` writes, and the metadata of all. `plans`: the result of `plan_own` of each rank."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    paths: dict[str, Any] = {}
    for plan in plans:
        paths |= plan.planner_data
    joined, metadata = planner.create_global_plan(list(plans))
    numbered = FileSystemWriter(Path()).prepare_global_plan(joined)
    return numbered[rank], dataclasses.replace(metadata, planner_data=paths)


def write_shards(folder: Path, plan: SavePlan, own: Mapping[str, torch.Tensor]) -> tuple[dict[str, FileFacts], Any]:
    """Write a file with what `plan` says into `folder`; return its facts, and the results for `finish_shards`.

    `own`: the result of `local_shards`, on the CPU. Raises OSError.
    """
    if not plan.items:
        return {}, []
    writer = _Writer(folder)
    planner = _LocalPlanner(own)
    try:
        results = writer.write_data(plan, planner).wait()
    except RuntimeError:
        writer.files.raise_first()
        raise
    return writer.files.facts, results


def finish_shards(folder: Path, metadata: Metadata, results: Sequence[Any]) -> dict[str, FileFacts]:
    """Write the index of the files of all ranks; return its facts. `results`: those of each rank. Raises OSError."""
    writer = _Writer(folder)
    writer.finish(metadata, list(results))
    (facts,) = writer.files.facts.values()
    return {SHARDS_FILE: facts}


def load_plain(file: IO[bytes]) -> Any:
    """Unpickle values of DCP's own classes, without running code. Raises pickle.UnpicklingError for other ones."""
    return _Unpickler(file).load()


class ShardReader:
    """The tensors in the shards of the checkpoint in `folder`. Reading is not collective.

    Raises CorruptCheckpointError if the index cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            with open(folder / SHARDS_FILE, "rb") as file:
                self._metadata: Metadata = load_plain(file)
            self._paths = {tuple(path): key for key, path in self._metadata.planner_data.items()}
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, ImportError) as error:
            found = f"the index of its shards, {SHARDS_FILE}, cannot be read ({type(error).__name__}: {error})"
            raise CorruptCheckpointError(f"reading {folder}", found=found) from error

    def outlines(self, *prefix: str) -> dict[TensorPath, torch.Tensor]:
        """Return a tensor without memory, on the device "meta", for each tensor below `prefix`, by the rest of it."""
        found = {}
        for path, key in self._paths.items():
            about = self._metadata.state_dict_metadata[key]
            if path[: len(prefix)] == prefix and isinstance(about, TensorStorageMetadata):
                found[path[len(prefix) :]] = torch.empty(about.size, dtype=about.properties.dtype, device="meta")
        return found

    def outlined_weights(self, name: str) -> dict[str, torch.Tensor]:
        """Return the outlines of the weights called `name`, by plain name; {} if none of them is in shards."""
        return {path[0]: outline for path, outline in self.outlines(name).items() if len(path) == 1}

    def read_whole(self, *prefix: str) -> dict[TensorPath, torch.Tensor]:
        """Return each tensor below `prefix`, whole and on the CPU, by the rest of its path."""
        whole = {path: torch.empty_like(one, device="cpu") for path, one in self.outlines(*prefix).items()}
        self.read_into({(*prefix, *path): one for path, one in whole.items()})
        return whole

    def read_into(self, targets: Mapping[TensorPath, torch.Tensor]) -> None:
        """Read the tensors at the paths of `targets` into them, of DTensors this rank's shards only.

        Raises CorruptCheckpointError with the file and the rank that wrote it.
        """
        named = {self._paths[path]: target.detach() for path, target in targets.items()}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(cast(dict[str, Any], named), self._metadata, is_coordinator=False)
        reader = FileSystemReader(self._folder)
        reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        by_file: dict[str, list[Any]] = {}
        for item in planner.create_local_plan().items:
            if all(item.lengths):
                file = self._metadata.storage_data[item.storage_index].relative_path
                by_file.setdefault(file, []).append(item)
        for file, items in by_file.items():
            try:
                reader.read_data(LoadPlan(items), planner).wait()
            except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, AssertionError) as error:
                raise CorruptCheckpointError(
                    f"reading {self._folder / file}",
                    found=f"the shards of rank {shard_owner(file)} cannot be read ({type(error).__name__}: "
                    f"{next(iter(str(error).splitlines()), '')})",
                ) from error


def _has_elements(item: Any) -> bool:
    return all(item.tensor_data.chunk.sizes)


class _LocalPlanner(DefaultSavePlanner):
    """Gives the writer this rank's parts, of which each tensor has at most one."""

    def __init__(self, own: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._own = own

    def lookup_object(self, index: Any) -> torch.Tensor:
        return self._own[index.fqn]


class _Stream(HashingFile):
    """A file as torch's writer uses it: it asks for the position, and syncs and closes it itself."""

    def tell(self) -> int:
        return self.facts.num_bytes

    def close(self) -> None:
        """Do nothing: the end of the `with` block syncs and closes the file."""


class _Files(FileSystem):
    """Writes files with checksums, and keeps the first error: torch raises a consequence of it instead."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        del mode
        stream = self._streams[Path(path).name] = _Stream(Path(path))
        with stream:
            yield stream

    @property
    def facts(self) -> dict[str, FileFacts]:
        return {name: stream.facts for name, stream in self._streams.items()}

    def raise_first(self) -> None:
        for name, stream in self._streams.items():
            if stream.error is not None:
                stream.error.filename = stream.error.filename or name
                raise stream.error


class _Writer(FileSystemWriter):
    """Torch's writer of files, which here leaves the directory's name out of them: it is renamed."""

    def __init__(self, folder: Path) -> None:
        # Nothing is copied ahead: that would use a device in a thread in which it was not chosen.
        super().__init__(folder, single_file_per_rank=True, sync_files=False, per_thread_copy_ahead=0)
        self.fs = self.files = _Files()

    def storage_meta(self) -> None:
        return None


_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    (FileFacts.__module__, "FileFacts"),
    ("torch.distributed.checkpoint.storage", "WriteResult"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
"""What may be in an index besides dtypes and the classes of torch.distributed.checkpoint.metadata."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_metadata = module == "torch.distributed.checkpoint.metadata" and "." not in name
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or is_metadata or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        found = f"it contains more than tensors and plain values: reading it would run {module}.{name}"
        raise pickle.UnpicklingError(found)
