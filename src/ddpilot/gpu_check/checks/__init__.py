# SPDX-License-Identifier: Apache-2.0
"""The checks, by subject. They import torch; each runs in a separate process (`gpu_check.child`)."""
