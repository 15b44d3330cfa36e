# SPDX-License-Identifier: Apache-2.0
"""Run-time checks inside the ranks: probes note what training does; `watch.rules` derives findings from it."""
