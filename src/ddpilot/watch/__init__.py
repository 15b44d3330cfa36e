# SPDX-License-Identifier: Apache-2.0
"""What ranks left, seen from outside and said in findings. Free of torch.

Nothing here asks a rank for anything: `view` holds what was gathered, `stall` says what it means.
"""
