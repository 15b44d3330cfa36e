# SPDX-License-Identifier: Apache-2.0
"""Observe every collective of this process and write it into the ring. Imports `flight_ring` and `journal`."""
