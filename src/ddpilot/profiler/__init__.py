# SPDX-License-Identifier: Apache-2.0
"""Where the time of an update goes, on every rank, and what to change. Torch only in `spans` and `ranks`' probes."""
