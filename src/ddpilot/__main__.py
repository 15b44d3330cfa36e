# SPDX-License-Identifier: Apache-2.0
"""`python -m ddpilot`: the command, where its script is not on the path or another interpreter's is."""

from __future__ import annotations

from ddpilot.cli.app import main

if __name__ == "__main__":
    main()
