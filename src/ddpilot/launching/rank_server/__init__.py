# SPDX-License-Identifier: Apache-2.0
"""The process that forks ranks, its client, and what a rank runs first. Imports `shipping`; in ranks `group`."""
