# SPDX-License-Identifier: Apache-2.0
"""The process on each node of a session that starts ranks there. Imports `kernels`, `nodes` and below."""
