# SPDX-License-Identifier: Apache-2.0
"""What makes updates slow, by subject: ranks, gradients, host. Each yields findings with what its end would give."""
