# SPDX-License-Identifier: Apache-2.0
"""Turn what `matching` finds into findings; has all texts; imports `matching`, `snapshot` and `source`."""
