# SPDX-License-Identifier: Apache-2.0
"""The flight ring: every collective of a rank, kept where it outlives the rank.

`recording` is the writer's side, inside a rank; `reading` the reader's, outside and free of torch. What lies between
them is a file, laid out as docs/flight-ring.md says.
"""
