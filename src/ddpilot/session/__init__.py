# SPDX-License-Identifier: Apache-2.0
"""Persistent ranks, each a Jupyter kernel. Imports `watch`, `launching`, `output`, `group`, `record` and below."""
