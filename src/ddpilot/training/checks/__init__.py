# SPDX-License-Identifier: Apache-2.0
"""Check losses, gradients and buffers of a rank during training. Imports `models`, `batch_groups`, `loss_weights`."""
