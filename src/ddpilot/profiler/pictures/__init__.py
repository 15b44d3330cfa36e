# SPDX-License-Identifier: Apache-2.0
"""Pictures of profiles: HTML without scripts or network, and matplotlib figures. Imports `phases` and numpy."""
