# SPDX-License-Identifier: Apache-2.0
"""Lightning: a `Trainer` or `Fabric` with a single process's arguments runs on all ranks of a session."""
