# SPDX-License-Identifier: Apache-2.0
"""``ddpilot run``: run scripts with torch elastic's agent, ddpilot's output and failure reports. See docs/run.md."""
