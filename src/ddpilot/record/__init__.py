# SPDX-License-Identifier: Apache-2.0
"""Flight ring: records every collective of a rank into a file that survives the rank's death.

`recording` is the writing side, inside a rank. `reading` is the reading side, used from other processes; it does not
import torch. The file format between them is described in docs/flight-ring.md.
"""
