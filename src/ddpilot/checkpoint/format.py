# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint: staged, renamed atomically once complete, and verified by size and checksum when read."""

from __future__ import annotations

import json
import pickle
import pickletools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ddpilot.checkpoint.atomic_files import (
    SHARDS_FILE,
    FileFacts,
    HashingFile,
    publish,
    read_facts,
    shard_owner,
    staging,
)
from ddpilot.checkpoint.manifest import FILE_NAME, Manifest, RunProgress, now_and_here, parse_manifest
from ddpilot.checkpoint.safetensors_file import (
    INDEX_SUFFIX,
    MAX_FILE_BYTES,
    render_index,
    split_weights,
    write_safetensors,
)
from ddpilot.errors import CheckpointError, CorruptCheckpointError

if TYPE_CHECKING:
    from ddpilot.checkpoint.shard_files import ShardReader

STAGING_PREFIX = ".writing-"
STATE_FILE = "state.pt"
STATE_NAMES = ("optimizers", "others", "extra", "kinds")
"""Keys of `STATE_FILE`: state dicts by name, the state of models besides weights, and the classes of optimizers."""
CHECKPOINT_NAME = re.compile(r"save-(\d{6,})-step-(\d+)")
"""Name of a checkpoint's directory, with a number that counts up and the number of updates."""
LATEST = "latest"
BEST = "best"
"""Pointers: files next to the checkpoints that contain the name of one."""
_WEIGHTS = re.compile(r"(\w+)\.safetensors(\.index\.json)?", re.ASCII)
"""Names of the file or the index of a model's weights."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a checkpoint, in CPU memory; not modified while they are written."""

    progress: RunProgress
    metrics: Mapping[str, float]
    weights: Mapping[str, Mapping[str, torch.Tensor]]
    """By model name, then by plain tensor name."""
    state: Mapping[str, Any]
    """State dicts by name, the same on all ranks."""
    parts: Sequence[Mapping[str, Any]]
    """The state of each rank, in rank order."""


class StagedSave:
    """A staging directory in `folder` for the checkpoint `name`, in which other ranks write, too.

    As a context manager, which may be entered in a different thread: the block publishes the directory; it is removed
    if the block raises. Raises OSError.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.write_shards: Callable[[], dict[str, FileFacts]] = dict
        """Writes the shards of this rank into `path`, waits for those of the others, and returns all files' facts."""
        self._staging = staging(folder, f"{STAGING_PREFIX}{name}-")
        self.path = self._staging.__enter__()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._staging.__exit__(kind, error, trace)

    def remove(self) -> None:
        """Remove the directory."""
        with suppress(OSError), self:
            raise OSError("the checkpoint was given up")


def checkpoint_number(name: str) -> int:
    """Return the number in the name of a checkpoint."""
    return int(name.split("-")[1])


def local_names(folder: Path) -> list[str]:
    """Return the names of all checkpoints in the directory `folder`, newest first; [] if it does not exist."""
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted(names, key=lambda name: (checkpoint_number(name), name), reverse=True)


def read_pointer(folder: Path, pointer: str) -> str | None:
    """Return the contents of file `LATEST` or `BEST` in `folder`; None if it is missing, "" if it is a directory."""
    try:
        return (folder / pointer).read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        return ""


def weights_file(name: str) -> str:
    """Return the file name of the weights called `name`, if they are in one file."""
    return f"{name}.safetensors"


def index_file(name: str) -> str:
    """Return the file name of the index of the weights called `name`, if they are in several files."""
    return f"{name}{INDEX_SUFFIX}"


def part_file(rank: int) -> str:
    """Return the file name of the state of rank `rank`."""
    return f"rank-{rank}.pt"


def write_checkpoint(
    folder: Path,
    name: str,
    contents: Contents,
    max_file_bytes: int = MAX_FILE_BYTES,
    staged_save: StagedSave | None = None,
) -> Path:
    """Write `contents` to the directory `name` in `folder` and return its path.

    `max_file_bytes`: weights of a model with more bytes are split into several files, with an index. `staged_save`:
    the staging directory, if there is one already. Raises OSError, after removing all that was written. The caller
    ensures that `name` is new.
    """
    opened = staged_save or StagedSave(folder, name)
    with opened as staged:
        files: dict[str, FileFacts] = {}
        for model, weights in contents.weights.items():
            files |= _write_weights(staged, model, weights, max_file_bytes)
        files[STATE_FILE] = _write(staged / STATE_FILE, _write_torch, dict(contents.state))
        for rank, part in enumerate(contents.parts):
            files[part_file(rank)] = _write(staged / part_file(rank), _write_torch, dict(part))
        files |= opened.write_shards()
        manifest = Manifest(progress=contents.progress, metrics=dict(contents.metrics), files=files, **now_and_here())
        _write(staged / FILE_NAME, HashingFile.write, manifest.render().encode())
        return publish(staged, name)


def _write_weights(
    folder: Path, name: str, weights: Mapping[str, torch.Tensor], max_file_bytes: int
) -> dict[str, FileFacts]:
    split = split_weights(name, weights, max_file_bytes)
    facts = {
        file: _write(folder / file, write_safetensors, {tensor: weights[tensor] for tensor in tensors})
        for file, tensors in split.items()
    }
    if len(split) > 1:
        index = render_index(split, weights).encode()
        facts[index_file(name)] = _write(folder / index_file(name), HashingFile.write, index)
    return facts


def _write(path: Path, write: Callable[[HashingFile, Any], object], what: object) -> FileFacts:
    try:
        with HashingFile(path) as sink:
            write(sink, what)
    except OSError as error:
        error.filename = error.filename or str(path.name)
        raise
    return sink.facts


def _write_torch(sink: HashingFile, tree: Mapping[str, Any]) -> None:
    try:
        torch.save(tree, cast(IO[bytes], sink))
    except RuntimeError as error:
        if sink.error is None:
            raise
        raise sink.error from error


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were verified. Contents are read only when requested."""

    path: Path
    """Its directory."""
    manifest: Manifest
    """Position of the run, metrics and versions."""

    def weights(self, name: str = "model") -> dict[str, torch.Tensor]:
        """Return the weights saved under `name`, by plain name, on the CPU.

        Raises CheckpointError if there are none.
        """
        files = self.manifest.files
        if index_file(name) in files:
            return read_indexed(self.path / index_file(name))
        if weights_file(name) not in files:
            there = [match[1] for file in files if (match := _WEIGHTS.fullmatch(file))]
            if (shards := self.shards()) is not None:
                if whole := {path[0]: one for path, one in shards.read_whole(name).items() if len(path) == 1}:
                    return whole
                there += dict.fromkeys(path[0] for path in shards.outlines() if len(path) == 2)
            did = f"reading the weights {name!r} of {self.path}"
            if not there:
                raise _layout_error(self, did, "it has weights of no model")
            found = f"it has weights for {', '.join(map(repr, there))}"
            raise CheckpointError(did, found=found, fix="Request one of these.")
        return read_safetensors(self.path / weights_file(name))

    def state(self) -> dict[str, Any]:
        """Return the saved state dicts, by name, with tensors on the CPU. Executes no code in the file.

        The state of an optimizer whose parameters were sharded is whole.
        """
        state = self.state_without_shards()
        shards = self.shards()
        if shards is not None:
            for name, saved in state.get("optimizers", {}).items():
                for (_, number, key), whole in shards.read_whole(name).items():
                    saved["state"].setdefault(int(number), {})[key] = whole
        return state

    def state_without_shards(self) -> dict[str, Any]:
        """Return the saved state dicts as `state` does, without the tensors in shards."""
        return dict(read_torch(self.path / STATE_FILE))

    def shards(self) -> ShardReader | None:
        """Return a reader of the shards that ranks have written; None if the checkpoint has none."""
        if SHARDS_FILE not in self.manifest.files:
            return None
        from ddpilot.checkpoint.shard_files import ShardReader  # slow to import

        return ShardReader(self.path)

    def part(self, rank: int) -> dict[str, Any] | None:
        """Return the state of rank `rank`; None if the run had no such rank. Executes no code in the file."""
        if part_file(rank) not in self.manifest.files:
            return None
        return dict(read_torch(self.path / part_file(rank)))


def check_layout(found: Checkpoint, file: str, tree: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise CheckpointError unless `tree`, the content of `file` of `found`, has a dict under each of `names`."""
    if missing := [name for name in names if not isinstance(tree.get(name), Mapping)]:
        what = f"it has no dict under {', '.join(map(repr, missing))}"
        raise _layout_error(found, f"reading {found.path / file}", what)


def _layout_error(found: Checkpoint, did: str, what: str) -> CheckpointError:
    written, own = (each.get("ddpilot", "?") for each in (found.manifest.versions, now_and_here()["versions"]))
    return CheckpointError(
        did,
        found=f"{what}, so it is not a checkpoint of a Loop, or of a different version: ddpilot {written} wrote it, "
        f"and this is {own}",
        fix="Use the version that wrote it to save the weights as a safetensors file, which load_weights() reads.",
    )


def read_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """Return the checkpoint in the directory `path`.

    `verify`: True reads every file and compares its checksum (about a second per gigabyte); False compares sizes only.
    Raises CorruptCheckpointError with all problems found.
    """
    try:
        text = (path / FILE_NAME).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(
            f"reading {path}", found=f"{FILE_NAME} cannot be read ({error}): it is incomplete, or not a checkpoint"
        ) from error
    manifest = parse_manifest(text, where=str(path))
    wrong = [text for name, facts in manifest.files.items() if (text := _compare(path, name, facts, verify))]
    if wrong:
        raise CorruptCheckpointError(f"reading {path}", found="; ".join(wrong))
    return Checkpoint(path, manifest)


def _compare(path: Path, name: str, facts: FileFacts, verify: bool) -> str:
    if Path(name).name != name:
        return f"{name!r} is outside of it"
    owner = shard_owner(name)
    what = name if owner is None else f"{name}, the shards of rank {owner},"
    try:
        num_bytes = (path / name).stat().st_size
        if num_bytes != facts.num_bytes:
            return f"{what} has {num_bytes} bytes, not {facts.num_bytes}"
        if verify and read_facts(path / name) != facts:
            return f"{what} was changed: its checksum does not match"
    except FileNotFoundError:
        return f"{what} is missing"
    except OSError as error:
        return f"{what} cannot be read ({error})"
    return ""


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, on the CPU. Raises CorruptCheckpointError."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        found = f"it is not a complete safetensors file ({error})"
        raise CorruptCheckpointError(f"reading {path}", found=found) from error


def read_indexed(index: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the safetensors files next to `index`, their index in Hugging Face's format, on the CPU.

    Raises CorruptCheckpointError if a file or a tensor is missing or damaged.
    """
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = list(dict.fromkeys(weight_map.values()))
        outside = [file for file in files if Path(file).name != file]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        found = f"it is not a complete index of safetensors files ({type(error).__name__}: {error})"
        raise CorruptCheckpointError(f"reading {index}", found=found) from error
    if outside:
        raise CorruptCheckpointError(
            f"reading {index}", found=f"it names {outside[0]!r}, which is outside of its folder"
        )
    loaded = {file: read_safetensors(index.parent / file) for file in files}
    missing = [f"{tensor!r} is not in {file}" for tensor, file in weight_map.items() if tensor not in loaded[file]]
    if missing:
        raise CorruptCheckpointError(f"reading {index}", found=f"{missing[0]} ({len(missing)} tensors are missing)")
    return {tensor: loaded[file][tensor] for tensor, file in weight_map.items()}


def is_safetensors(path: Path) -> bool:
    """True if the file looks like safetensors, whatever its suffix: a header size and a JSON header."""
    with path.open("rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size


def _find_call(path: Path) -> str:
    """Return the first function or class that loading a pickle would call, from its opcodes; "" if there is none.

    No opcode is executed.
    """
    texts: list[str] = []
    try:
        with path.open("rb") as file:
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name in ("GLOBAL", "INST"):
                    return str(argument).replace(" ", ".")
                if opcode.name == "STACK_GLOBAL":
                    return ".".join(texts[-2:])
                if isinstance(argument, str):
                    texts.append(argument)
    except (ValueError, OSError):  # not a pickle, or a truncated one
        return ""
    return ""


def read_torch(path: Path) -> Mapping[str, Any]:
    """Return the dict in a `torch.save` file, with tensors on the CPU, without executing code in the file.

    Raises CorruptCheckpointError if it holds other objects, with the function or class that loading would call.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        called = named[1] if named else _find_call(path)
        raise CorruptCheckpointError(
            f"reading {path}",
            found=f"it contains more than tensors and plain values: reading it would run {called}"
            if called
            else "it cannot be read as tensors and plain values: it is not a file of torch.save, or it is damaged",
            fix="If you trust it, load it with torch.load(weights_only=False) and save its state_dict() again.",
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CorruptCheckpointError(
            f"reading {path}", found=f"it is not a complete file of torch.save ({str(error).splitlines()[0]})"
        ) from error
    if not isinstance(loaded, Mapping):
        raise CorruptCheckpointError(f"reading {path}", found=f"it contains a {type(loaded).__name__}, not a dict")
    return loaded
