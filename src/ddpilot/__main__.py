# SPDX-License-Identifier: Apache-2.0
"""``python -m ddpilot``: the command for environments in which its script is not on the path."""

from __future__ import annotations

from ddpilot.cli.app import main

if __name__ == "__main__":
    main()
