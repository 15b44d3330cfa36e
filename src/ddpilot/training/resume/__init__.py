# SPDX-License-Identifier: Apache-2.0
"""Saving a run and resuming it. Imports models, coordination and options of training."""
