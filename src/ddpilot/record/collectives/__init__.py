# SPDX-License-Identifier: Apache-2.0
"""See every collective of this process and write it into the ring. Imports `record`'s modules, `flight_ring`."""
