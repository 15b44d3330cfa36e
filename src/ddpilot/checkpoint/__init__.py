# SPDX-License-Identifier: Apache-2.0
"""Write checkpoints and weights atomically, and verify them when read. Imports `group` and `environments`."""
