# SPDX-License-Identifier: Apache-2.0
"""``ddpilot run``: scripts on ranks of torch elastic's agent. Imports `launching`'s modules, not its packages."""
