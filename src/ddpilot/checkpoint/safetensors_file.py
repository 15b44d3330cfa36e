# SPDX-License-Identifier: Apache-2.0
"""Writes safetensors files with checksums, under the plain names of weights; errors are OSErrors with errno.

The library's own writer maps the file into memory and reports a full disk without an errno. It reads these files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

import torch

from ddpilot.checkpoint.atomic_files import HashingFile
from ddpilot.errors import CheckpointError

_ALIGNMENT_BYTES = 8

MAX_FILE_BYTES = 5_000_000_000
"""Default size above which weights are split into several files, as Hugging Face's libraries do."""
INDEX_SUFFIX = ".safetensors.index.json"

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of torch dtypes in the safetensors format."""


def check_dtypes(weights: Mapping[str, object], *, where: str) -> None:
    """Raise CheckpointError for values that the format does not support; `where` names the weights."""
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):
            found = f"{name!r} is a {type(value).__name__}, not a tensor"
        elif value.dtype not in DTYPE_NAMES:
            found = f"{name!r} is of type {value.dtype}, which safetensors does not support"
        else:
            continue
        raise CheckpointError(f"saving {where}", found=found, fix="Pass it in `state` instead of `weights`.")


def write_safetensors(sink: HashingFile, weights: Mapping[str, torch.Tensor]) -> None:
    """Write `weights` (dense tensors on the CPU, any shape) to `sink`. Raises OSError.

    A tensor under two names is written twice, so that any reader finds both.
    """
    # Largest element size first: every tensor is then aligned to its element size, as readers that use mmap expect.
    names = sorted(weights, key=lambda name: (-weights[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        end = start + weights[name].numel() * weights[name].element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[weights[name].dtype],
            "shape": list(weights[name].shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    sink.write(len(text).to_bytes(8, "little"))
    sink.write(text)
    for name in names:
        if weights[name].numel():
            sink.write(weights[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)


def split_weights(name: str, weights: Mapping[str, torch.Tensor], max_file_bytes: int) -> dict[str, list[str]]:
    """Return a dict from file names to the tensors in each file, at most `max_file_bytes` of data per file.

    The file names are Hugging Face's: `name.safetensors`, or `name-00001-of-00002.safetensors` and so on if there are
    several. Tensors keep their order; a single tensor above the limit gets a file of its own.
    """
    groups: list[list[str]] = [[]]
    num_bytes = 0
    for tensor, value in weights.items():
        if groups[-1] and num_bytes + value.nbytes > max_file_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(tensor)
        num_bytes += value.nbytes
    if len(groups) == 1:
        return {f"{name}.safetensors": groups[0]}
    return {f"{name}-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, 1)}


def render_index(files: Mapping[str, Iterable[str]], weights: Mapping[str, torch.Tensor]) -> str:
    """Return the text of the index of `files`, in Hugging Face's format."""
    total = sum(value.nbytes for value in weights.values())
    weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
    return (
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, ensure_ascii=False) + "\n"
    )


_COMPILED = "_orig_mod"
_WRAPPED = "module."


def plain_tensors(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights called `name` by plain names. Raises CheckpointError if they cannot be saved."""
    if not re.fullmatch(r"[A-Za-z0-9_]+", name):
        raise CheckpointError(
            f"saving the weights {name!r}", found="it becomes a file name", fix="Use letters, digits and `_`."
        )
    check_dtypes(tensors, where=f"the weights {name!r}")
    return {short: tensors[full] for full, short in plain_names(tensors).items()}


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return a dict from each of `names` to its plain name.

    Removes `_orig_mod.` everywhere, since torch.compile also wraps inner modules; removes a leading `module.` only if
    every name has it, since a model may have a submodule of that name. Raises CheckpointError if two names become
    equal.
    """
    plain = {name: _without_compiled(name) for name in names}
    while plain and all(name.startswith(_WRAPPED) for name in plain.values()):
        plain = {name: short.removeprefix(_WRAPPED) for name, short in plain.items()}
    if len(set(plain.values())) < len(plain):
        firsts: dict[str, str] = {}
        both = next((firsts[short], name) for name, short in plain.items() if firsts.setdefault(short, name) != name)
        raise CheckpointError(
            "removing prefixes from the names of weights",
            found=f"{both[0]!r} and {both[1]!r} would both be {plain[both[0]]!r}",
            fix="Save the unwrapped model's state_dict().",
        )
    return plain


def _without_compiled(name: str) -> str:
    *path, last = name.split(".")
    return ".".join([*(part for part in path if part != _COMPILED), last])
