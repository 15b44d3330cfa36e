# SPDX-License-Identifier: Apache-2.0
"""Observe every collective of this process and describe it for the ring's writer. Imports `flight_ring`, `journal`."""
