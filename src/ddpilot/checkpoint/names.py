# SPDX-License-Identifier: Apache-2.0
"""Names of weights without the prefixes of DistributedDataParallel and torch.compile."""

from __future__ import annotations

from collections.abc import Iterable

from ddpilot.errors import CheckpointError

_COMPILED = "_orig_mod"
_WRAPPED = "module."


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
