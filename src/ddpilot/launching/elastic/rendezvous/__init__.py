# SPDX-License-Identifier: Apache-2.0
"""Nodes meet at a static rendezvous, after checks of their network, and exchange states. Imports `elastic.options`."""
