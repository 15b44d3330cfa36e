# SPDX-License-Identifier: Apache-2.0
"""Which samples each rank takes: exactly those of one process, at any world size."""
