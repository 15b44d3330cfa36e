# SPDX-License-Identifier: Apache-2.0
"""Note what is trained on: samples, inputs, random draws, losses, metrics. Imports `probes`' modules."""
