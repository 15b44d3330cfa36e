# SPDX-License-Identifier: Apache-2.0
"""Starting ranks. What the parent needs of it is free of torch; what runs in a rank is in `local/rank*.py`."""
