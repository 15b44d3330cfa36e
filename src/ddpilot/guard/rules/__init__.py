# SPDX-License-Identifier: Apache-2.0
"""Derive findings from probes' notes, outside the ranks and without torch. Imports `record`, `source`, `findings`."""
