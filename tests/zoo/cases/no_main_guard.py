# SPDX-License-Identifier: Apache-2.0
"""A process is spawned at the top level of a script, which it imports."""

# without: error
# finding: DDP111

import multiprocessing
import sys


def train() -> None:
    """What the child is to run."""


child = multiprocessing.get_context("spawn").Process(target=train)
child.start()
child.join()
sys.exit(child.exitcode)
