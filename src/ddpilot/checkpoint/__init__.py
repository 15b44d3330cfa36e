# SPDX-License-Identifier: Apache-2.0
"""Write checkpoints and weights by `atomic_files`, and verify them when read. Imports `group` and `environments`."""
