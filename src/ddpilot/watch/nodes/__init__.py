# SPDX-License-Identifier: Apache-2.0
"""Exchange ranks' states and findings between observers of several nodes. Imports `analysis` and `guard.rules`."""
