# SPDX-License-Identifier: Apache-2.0
"""Loads weights into a model: all of them or none, onto the model's devices. Merges the shards of a checkpoint."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpilot.checkpoint.atomic_files import HashingFile
from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.checkpoint.format import (
    BEST,
    CHECKPOINT_NAME,
    LATEST,
    STATE_FILE,
    STATE_NAMES,
    Checkpoint,
    check_layout,
    index_file,
    is_safetensors,
    read_checkpoint,
    read_indexed,
    read_safetensors,
    read_torch,
)
from ddpilot.checkpoint.manifest import FILE_NAME
from ddpilot.checkpoint.remote.store import clean_url, is_url, without_password
from ddpilot.checkpoint.safetensors_file import INDEX_SUFFIX, plain_names, write_safetensors
from ddpilot.errors import CheckpointError, MismatchedCheckpointError

_NESTED = ("state_dict", "model_state_dict", "model")
_NUM_SHOWN = 10


def load_weights(model: torch.nn.Module, path: str | os.PathLike[str], *, name: str = "model") -> None:
    """Load weights from `path` into `model`, in place, on the devices of its tensors. Call it on every rank.

    Not collective. Prefixes of DistributedDataParallel and torch.compile are ignored on both sides. No code in the file
    is executed.

    - `path`: a `.safetensors` file; a `torch.save` file with a state_dict, also under the key "state_dict",
      "model_state_dict" or "model"; a checkpoint; or a directory of checkpoints, whose latest is loaded (append "/best"
      for the best). For weights in several safetensors files, their `.safetensors.index.json` or its directory. A URL
      is possible, "s3://bucket/run7/best".
    - `name`: the model whose weights to load, if a checkpoint holds several.

    Raises MismatchedCheckpointError with the missing, unexpected and mis-shaped names, CorruptCheckpointError, or
    CheckpointError if there is no file; the model is then unchanged.
    """
    load_into(model, read_weights(path, name), source=str(path))


def load_into(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], *, source: str) -> None:
    """Load `weights` into `model`, in place, ignoring prefixes on both sides; `source` names the weights in errors.

    Raises MismatchedCheckpointError with the missing, unexpected and mis-shaped names; the model is then unchanged.
    """
    model.load_state_dict(match_weights(model, weights, source=source))


def match_weights(model: torch.nn.Module, weights: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Return all of `weights` under the names in the model's state_dict, without loading them.

    Raises MismatchedCheckpointError with missing, unexpected and mis-shaped names; `source` names the weights there.
    """
    own = model.state_dict()
    if set(own) == set(weights):
        matched = {name: weights[name] for name in own}
        missing, unexpected = [], []
    else:
        own_names = plain_names(own)
        given = {short: weights[full] for full, short in plain_names(weights).items()}
        missing = [short for short in own_names.values() if short not in given]
        unexpected = sorted(set(given) - set(own_names.values()))
        matched = {full: given[short] for full, short in own_names.items() if short in given}
    misshaped = [
        f"{name} {tuple(value.shape)} where the model has {tuple(own[name].shape)}"
        for name, value in matched.items()
        if isinstance(own[name], torch.Tensor) and own[name].shape != value.shape
    ]
    found = [
        f"{len(names)} {kind}: {', '.join(names[:_NUM_SHOWN])}{', ...' if len(names) > _NUM_SHOWN else ''}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("mis-shaped", misshaped))
        if names
    ]
    if found:
        raise MismatchedCheckpointError(
            f"loading {source} into a {class_name(model)}",
            found="the architecture differs; " + "; ".join(found),
            fix="Create the model as in the saved run.",
        )
    return matched


def class_name(model: Any) -> str:
    """Return the class name of the user's model, inside DDP and `torch.compile`."""
    while hasattr(model, "_orig_mod") or isinstance(model, DistributedDataParallel):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    return type(model).__name__


def read_weights(path: str | os.PathLike[str], name: str = "model") -> Mapping[str, torch.Tensor]:
    """Return the weights that `load_weights` would load, on the CPU. Raises its errors about the file."""
    found = find_checkpoint(path)
    if found is not None:
        return found.weights(name)
    path = Path(path).expanduser()
    if path.name.endswith(INDEX_SUFFIX):
        return read_indexed(path)
    if (path / index_file(name)).is_file():
        return read_indexed(path / index_file(name))
    if not path.is_file():
        raise CheckpointError(
            f"loading weights from {path}",
            found="it is neither a file nor a checkpoint",
            fix="Pass a .safetensors or .pt file, a checkpoint, or the directory that contains `latest` or an index.",
        )
    if path.suffix == ".safetensors" or is_safetensors(path):
        return read_safetensors(path)
    return _find_state_dict(read_torch(path), path)


def find_checkpoint(path: str | os.PathLike[str]) -> Checkpoint | None:
    """Return the checkpoint at `path`, verified: one, or the latest of a directory, or the best of "directory/best".

    None if `path` is none of these. Raises CheckpointError if a URL has no checkpoint.
    """
    if is_url(path):
        return _find_remote(clean_url(str(path)))
    path = Path(path).expanduser()
    if path.name in (LATEST, BEST) and path.is_file():
        path = path.parent / path.read_text(encoding="utf-8", errors="replace").strip()
    if (path / FILE_NAME).exists():
        return read_checkpoint(path)
    return CheckpointDir(path).latest() if (path / LATEST).exists() else None


def merge_shards(path: str | os.PathLike[str], to: str | os.PathLike[str], *, name: str = "model") -> Path:
    """Write one file with the whole state of a checkpoint whose parameters were sharded; return its path.

    Use it for plain PyTorch and other libraries; `Loop` and `load_weights` read any checkpoint as it is. Run it in one
    process, which holds the whole state in memory. A checkpoint without shards is accepted, too.

    - `path`: a checkpoint, or a directory of checkpoints (the latest; append "/best" for the best), also at a URL.
    - `to`: a file that does not exist. "model.safetensors" gets the weights called `name`. Any other name gets a dict
      for `torch.load(to, weights_only=True)`, with the state_dict of each model and each optimizer under its name.

    Raises CheckpointError if there is no checkpoint or `to` exists, and CorruptCheckpointError.
    """
    found, to = find_checkpoint(path), Path(to).expanduser()
    did = f"merging the shards of {path}"
    if found is None:
        raise CheckpointError(did, found="it is not a checkpoint", fix="Pass the `checkpoint_dir` of a run.")
    if to.exists():
        raise CheckpointError(did, found=f"{to} exists", fix="Remove it, or choose a different name.")
    new = to.with_name(f".{to.name}.{secrets.token_hex(4)}.new")
    try:
        with HashingFile(new) as sink:
            if to.suffix == ".safetensors":
                write_safetensors(sink, found.weights(name))
            else:
                torch.save(_whole_state(found), cast(IO[bytes], sink))
        os.rename(new, to)
    except OSError as error:
        fix = "Choose a different `to`, or free some space."
        raise CheckpointError(did, found=f"{to} cannot be written ({error})", fix=fix) from error
    finally:
        new.unlink(missing_ok=True)
    return to


def _whole_state(found: Checkpoint) -> dict[str, Any]:
    state = found.state()
    check_layout(found, STATE_FILE, state, STATE_NAMES)
    models = {name: {**found.weights(name), **extra} for name, extra in state["extra"].items()}
    return {**models, **state["optimizers"]}


def _find_remote(url: str) -> Checkpoint:
    folder, _, last = url.rpartition("/")
    if last == LATEST:
        found = CheckpointDir(folder).latest()
    elif last == BEST:
        found = CheckpointDir(folder).best()
    elif CHECKPOINT_NAME.fullmatch(last):
        found = CheckpointDir(folder).open(last)
    else:
        found = CheckpointDir(url).latest()
    if found is None:
        raise CheckpointError(
            f"loading weights from {without_password(url)}",
            found="there are no checkpoints",
            fix="Pass the URL of a directory of checkpoints or of one of them; download other files first.",
        )
    return found


def _find_state_dict(loaded: Mapping[str, Any], path: Path) -> Mapping[str, torch.Tensor]:
    if loaded and all(isinstance(value, torch.Tensor) for value in loaded.values()):
        return loaded
    for key in _NESTED:
        if isinstance(loaded.get(key), Mapping):
            return _find_state_dict(loaded[key], path)
    held = ", ".join(f"{key!r}: {type(value).__name__}" for key, value in list(loaded.items())[:_NUM_SHOWN])
    raise CheckpointError(
        f"loading weights from {path}",
        found=f"it does not contain a state_dict, but {held or 'nothing'}",
        fix=f"Save model.state_dict(), alone or under one of {', '.join(map(repr, _NESTED))}.",
    )
