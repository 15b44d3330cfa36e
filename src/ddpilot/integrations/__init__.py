# SPDX-License-Identifier: Apache-2.0
"""Apps shipped with ddpilot, which adapt training libraries to the ranks of a session."""
