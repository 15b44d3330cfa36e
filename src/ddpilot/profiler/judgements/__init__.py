# SPDX-License-Identifier: Apache-2.0
"""What makes updates slow, by subject: ranks, gradients, host. Imports `phases`, `findings` and numpy; not torch."""
