# SPDX-License-Identifier: Apache-2.0
"""What is wrong with training, said from what the ranks' guards noted: one module for each kind of thing."""
