# SPDX-License-Identifier: Apache-2.0
"""Nodes of a job meet in a store and exchange their states. Imports `elastic.options`."""
