# SPDX-License-Identifier: Apache-2.0
"""A site's defaults of `JobOptions`: ``[slurm]`` in .ddpilot.toml, or ``[tool.ddpilot.slurm]`` in pyproject.toml."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpilot.errors import SlurmError
from ddpilot.slurm.options import ALTERNATIVES, JobOptions, make_options

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = ".ddpilot.toml"
_TABLES = {FILE: ("slurm",), "pyproject.toml": ("tool", "ddpilot", "slurm")}


def find_defaults(folder: Path, home: Path) -> tuple[dict[str, Any], Path | None]:
    """Return the defaults that hold in `folder`, and the file that they are from; an empty dict and None without one.

    The nearest folder upwards whose .ddpilot.toml or pyproject.toml has the table counts, then `home`. Raises
    SlurmError if a file cannot be read.
    """
    for each in dict.fromkeys((folder, *folder.parents, home)):
        for name, keys in _TABLES.items():
            if (path := each / name).is_file() and (table := _read_table(path, keys)) is not None:
                return table, path
    return {}, None


def options_with_defaults(given: Mapping[str, Any], folder: Path, home: Path) -> JobOptions:
    """Return the options in `given`, and for fields that are not in it those of `find_defaults`.

    Raises SlurmError, with the field and the file, for a wrong value.
    """
    defaults, path = find_defaults(folder, home)
    try:
        make_options(defaults)
    except SlurmError as error:
        did = f"reading the defaults of jobs in {path}"
        raise SlurmError(did, found=error.found, fix=error.fix, field=error.field) from None
    own = _as_fields(given)
    replaced = {name for names in ALTERNATIVES if own.keys() & set(names) for name in names}
    return make_options({**{k: v for k, v in _as_fields(defaults).items() if k not in replaced}, **own})


def _as_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in values.items()}


def _read_table(path: Path, keys: tuple[str, ...]) -> dict[str, Any] | None:
    """The table at `keys` in a TOML file; None if it is not there."""
    try:
        table: Any = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise SlurmError(f"reading {path}", found=str(error), fix="Correct the file") from error
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    if table is not None and not isinstance(table, dict):
        raise SlurmError(f"reading {path}", found=f"{'.'.join(keys)} is {table!r}", fix="Make it a table")
    return table
