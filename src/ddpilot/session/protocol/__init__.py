# SPDX-License-Identifier: Apache-2.0
"""Messages between the parent and its ranks. Imports `launching` and below; neither torch nor IPython."""
