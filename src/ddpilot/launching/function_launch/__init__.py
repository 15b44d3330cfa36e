# SPDX-License-Identifier: Apache-2.0
"""Run a function once on ranks of this machine. Imports `rank_server`, `shipping` and the modules of `launching`."""
