# SPDX-License-Identifier: Apache-2.0
"""Apps that ddpilot ships: what training libraries need on each rank of a session."""
