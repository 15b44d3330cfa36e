# SPDX-License-Identifier: Apache-2.0
"""Find training that continues with wrong numbers: probes in ranks, rules outside. Imports `record` and `source`."""
