# SPDX-License-Identifier: Apache-2.0
"""``ddpilot verify``: compare what a program computes on one rank and on several."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from ddpilot.diagnose.verify.verify import verify


def run_verify(program: str, args: Sequence[str], *, as_json: bool, verbose: bool, **options: Any) -> int:
    """Print what `verify` finds about `program` with `options`. Returns the exit status: 0 if the numbers agree.

    While runs are made, a line for each is printed to stderr.
    """
    result = verify(program, *args, show=lambda line: print(line, file=sys.stderr, flush=True), **options)
    if as_json:
        print(json.dumps(result.to_dict(), indent=1, ensure_ascii=False), flush=True)
    else:
        print(result.render(verbose=verbose, color=sys.stdout.isatty()), flush=True)
    return result.exit_status
