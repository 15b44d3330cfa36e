# SPDX-License-Identifier: Apache-2.0
"""Note what leads to each optimizer step, and fingerprint parameters. Imports `probes`' modules."""
