# SPDX-License-Identifier: Apache-2.0
"""Find causes of slow updates, by subject: ranks, gradients, host. Imports `phases`, `findings`, numpy; not torch."""
