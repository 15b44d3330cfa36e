# SPDX-License-Identifier: Apache-2.0
"""What TorchFix and ruff report on the labelled faults: nothing about ranks. Skipped if TorchFix is not on the PATH."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from ddpilot.lint.rules import CODES
from tests.unit.lint.labels import expected_in

HERE = Path(__file__).parent
MIN_RULES = 10
_REPORT = re.compile(r"^(?P<path>.+\.py):(?P<line>\d+):\d+: (?P<code>TOR\d+)", re.MULTILINE)
_OTHER_SUBJECTS = ("TOR401",)
"""About `num_workers` of a DataLoader: these stand on the lines of some faults and have nothing to do with them."""


def found_by_torchfix() -> set[tuple[str, int]]:
    """File and line of each report of TorchFix with all of its rules."""
    command = [shutil.which("torchfix") or "", "--select=ALL", str(HERE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert "Finished checking" in done.stdout + done.stderr, done.stderr
    reports = _REPORT.finditer(done.stdout + done.stderr)
    return {(e["path"], int(e["line"])) for e in reports if e["code"] not in _OTHER_SUBJECTS}


def found_by_ruff() -> set[tuple[str, int]]:
    """File and line of each report of ruff, with all of its rules, that is about torch or processes."""
    words = ["-m", "ruff", "check", "--isolated", "--select=ALL", "--output-format=json", "--no-cache", str(HERE)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=100, check=False)
    about = re.compile(r"torch|distributed|process|sampler|fork|pickle", re.IGNORECASE)
    return {
        (each["filename"], each["location"]["row"])
        for each in json.loads(done.stdout)
        if about.search(each["message"].partition("`")[0])
        and not str(each["code"]).startswith("S6")  # the security of any process that is started
    }


@pytest.mark.skipif(shutil.which("torchfix") is None, reason="TorchFix is not installed: pip install torchfix")
@pytest.mark.timeout(300)
def test_ten_rules_or_more_report_what_torchfix_and_ruff_do_not() -> None:
    """On no labelled line of these codes does either report anything; TorchFix reports loads and old names of AMP."""
    peers = found_by_torchfix() | found_by_ruff()
    assert peers
    both: dict[str, int] = defaultdict(int)
    for path in [*HERE.glob("fixtures/*/noise_*.py"), *HERE.glob("corpus/bad_*.py")]:
        for _, line, code in expected_in(path):
            both[code] += (str(path), line) in peers
    alone = [code for code in CODES if both.get(code) == 0]
    print("also reported by a peer:", {code: count for code, count in both.items() if count})
    assert len(alone) >= MIN_RULES, both
    assert {code for code, count in both.items() if count} <= {"DDP336", "DDP608", "DDP609", "DDP610"}, both
