# SPDX-License-Identifier: Apache-2.0
"""Why ranks gave no value, as they tell the parent in JSON, and the error that the parent makes of it."""

from __future__ import annotations

from collections.abc import Mapping

from ddpilot.errors import LaunchError, ShipError
from ddpilot.findings.words import render_ranks

MISSING = "there is no variable of that name"


def refuse(found: str, fix: str = "", *, path: str = "") -> dict[str, str]:
    """A refusal. `path`: of what cannot be pickled."""
    return {"found": found, "fix": fix, "path": path}


def make_refusal_error(did: str, by_rank: Mapping[int, Mapping[str, str]]) -> LaunchError:
    """One error for the refusals of all ranks: the first one, with every rank that says the same, and all fixes.

    `did`: for a refusal that is about no "expression" of its own. A ShipError where something cannot be pickled.
    """
    first = by_rank[min(by_rank)]
    alike = [rank for rank, refusal in by_rank.items() if refusal["found"] == first["found"]]
    did = f"pulling `{first['expression']}`" if "expression" in first else did
    did = f"{did} from {render_ranks(alike)}"
    fix = " ".join(dict.fromkeys(by_rank[rank]["fix"] for rank in sorted(alike) if by_rank[rank]["fix"]))
    if first["path"]:
        return ShipError(did, path=first["path"], found=first["found"], fix=fix)
    return LaunchError(did, found=first["found"], fix=fix)
