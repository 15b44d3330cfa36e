# SPDX-License-Identifier: Apache-2.0
"""Reasons why a rank could not return a value, as sent in JSON, and the exception built from them."""

from __future__ import annotations

from collections.abc import Mapping

from ddpilot.errors import LaunchError, ShipError
from ddpilot.findings.text import render_ranks

MISSING = "there is no variable of that name"


def refuse(found: str, fix: str = "", *, path: str = "") -> dict[str, str]:
    """Return a refusal. `path` is the path of the object that cannot be pickled, if any."""
    return {"found": found, "fix": fix, "path": path}


def make_refusal_error(did: str, by_rank: Mapping[int, Mapping[str, str]]) -> LaunchError:
    """Build one error from the refusals of the ranks: the first refusal, all ranks that share it, and all their fixes.

    `did` is used if the refusal names no "expression". The error is a ShipError if a value cannot be pickled.
    """
    first = by_rank[min(by_rank)]
    alike = [rank for rank, refusal in by_rank.items() if refusal["found"] == first["found"]]
    did = f"pulling `{first['expression']}`" if "expression" in first else did
    did = f"{did} from {render_ranks(alike)}"
    fix = " ".join(dict.fromkeys(by_rank[rank]["fix"] for rank in sorted(alike) if by_rank[rank]["fix"]))
    if first["path"]:
        return ShipError(did, path=first["path"], found=first["found"], fix=fix)
    return LaunchError(did, found=first["found"], fix=fix)
