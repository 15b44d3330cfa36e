# SPDX-License-Identifier: Apache-2.0
"""Run-time rules, inside the ranks: probes note what training does; `watch.rules` says what is wrong with it."""
