# SPDX-License-Identifier: Apache-2.0
"""Whether `ddpilot profile` names what makes a program slow: 12 programs with one planted cause each, and 6 good ones.

Each runs on two ranks, as a user would profile it. The first finding has to name the cause, with the rank and the line
where there is one. Good programs must not have a warning or an error. `--only NAME` runs some of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, main
from tests.accelerator import environment, why_not

PROGRAMS = Path(__file__).with_name("profile_programs.py")
LIMIT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What the first finding of a program has to say."""

    code: str
    ranks: tuple[int, ...] = ()
    line: str = ""
    """Part of the text of the line that is named; empty: none has to be."""


CAUSES = {
    "slow_loader": Cause(code="DDP721", line="in enumerate(loader)"),
    "slow_loader_of_rank": Cause(code="DDP722", ranks=(1,), line="in enumerate(loader)"),
    "slow_rank": Cause(code="DDP722", ranks=(1,), line="model(x)"),
    "item_each_step": Cause(code="DDP741", line="loss.item()"),
    "needless_search": Cause(code="DDP742", line="find_unused_parameters=True"),
    "tiny_buckets": Cause(code="DDP743", line="bucket_cap_mb"),
    "small_batch": Cause(code="DDP747"),
    "too_many_threads": Cause(code="DDP804"),
    "checkpoint_each_step": Cause(code="DDP725", ranks=(0,), line="torch.save("),
    "heavy_logging": Cause(code="DDP724", line="dist.all_reduce(statistics)"),
    "uneven_lengths": Cause(code="DDP748", line="for x in DataLoader"),
    "slow_link": Cause(code="DDP723"),
}
GOOD = ("good_ddp", "good_loop", "good_trainer", "good_accumulation", "good_lengths", "good_evaluation")


def profile(name: str) -> dict[str, Any]:
    """The profile of a program, as JSON."""
    command = [sys.executable, "-m", "ddpilot", "profile", str(PROGRAMS), "-n", "2", "--json", "--", name]
    more = environment() if name == "item_each_step" else {}
    done = subprocess.run(
        command, env={**os.environ, **more}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def is_right(name: str, findings: list[dict[str, Any]]) -> bool:
    """True if the first finding names the planted cause, or if a good program has no warning."""
    if name in GOOD:
        return all(each["severity"] == "info" for each in findings)
    if not findings:
        return False
    cause, first = CAUSES[name], findings[0]
    text = (first["place"] or {}).get("text", "")
    return first["code"] == cause.code and tuple(first["ranks"]) == cause.ranks and cause.line in text


def describe(finding: dict[str, Any]) -> str:
    """Code, factor, severity, ranks and line."""
    ranks = f" rank {finding['ranks'][0]}" if finding["ranks"] else ""
    line = f" `{finding['place']['text'][:50]}`" if finding["place"] else ""
    return f"{finding['code']} {finding['severity']} {finding['factor']:.2f}x{ranks}{line}"


def measure(rounds: int, names: tuple[str, ...] = (*CAUSES, *GOOD)) -> list[Row]:
    """A row for each program, and the counts."""
    rows, num_right = [], dict.fromkeys((True, False), 0)
    for name in names:
        if name == "item_each_step" and why_not():
            print(f"{name}: {why_not()}", file=sys.stderr)
            continue
        found = [profile(name) for _ in range(rounds)]
        right = [is_right(name, each["findings"]) for each in found]
        num_right[name in GOOD] += all(right)
        shown = found[0]["findings"] if all(right) else found[right.index(False)]["findings"]
        row = Row(
            what=name,
            ours="; ".join(map(describe, shown[:3])) or "no finding",
            peer=f"planted: {CAUSES[name].code}" if name in CAUSES else "good",
            ratio=f"{sum(right)} of {rounds} right",
            bar="named first" if name in CAUSES else "no warning",
            holds=all(right),
        )
        print(f"{row.what}: {row.ours} ({'right' if row.holds else 'WRONG'})", file=sys.stderr, flush=True)
        if not row.holds:
            print(*(f"  {each['summary']} {each['evidence']}" for each in shown), sep="\n", file=sys.stderr)
        rows.append(row)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", nargs="*", default=(*CAUSES, *GOOD))
    options, rest = parser.parse_known_args()
    sys.exit(main(lambda rounds: measure(rounds, tuple(options.only)), rounds=1, argv=rest))
