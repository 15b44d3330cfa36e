# SPDX-License-Identifier: Apache-2.0
"""Fixes for errors raised inside a rank of ddpilot, where the page's fix assumes that no launcher was used."""

from __future__ import annotations

from ddpilot.findings.catalog import Entry

_KEEP = (
    "The launcher has set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank: let the program not "
    "remove them (`os.environ`), and hand them on to what it starts (`env=`)"
)
_FIXES = {
    "DDP101": _KEEP,
    "DDP102": _KEEP,
    "DDP103": "Leave `init_method=`, `store=` and the port out: `init_process_group()` alone meets at the launcher's "
    "port, which is free; or end who holds this one (`ss -ltnp`)",
    "DDP104": "Leave MASTER_ADDR and `init_method=` to the launcher, which has set where ranks meet; or name a machine "
    "that `getent hosts NAME` finds",
    "DDP209": "The other end of a connection closed it, and no rank is known to have failed before that: look at what "
    "the program was connected to, and at the last lines of the other ranks",
}


def fix_in_rank(entry: Entry) -> str:
    """Return the first fix that applies inside a rank, on one line without its final punctuation."""
    return _FIXES.get(entry.code, entry.first_fix)
