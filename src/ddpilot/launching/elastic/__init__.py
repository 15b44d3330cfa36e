# SPDX-License-Identifier: Apache-2.0
"""Scripts on ranks: torch elastic's agent with ddpilot's output, environment and failure text. See docs/run.md."""
