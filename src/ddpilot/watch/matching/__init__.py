# SPDX-License-Identifier: Apache-2.0
"""Match the ranks' collectives: mismatches, waits, cycles, exits; imports `snapshot` and `record`, has no texts."""
