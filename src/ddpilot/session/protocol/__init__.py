# SPDX-License-Identifier: Apache-2.0
"""What the parent and its ranks send each other. Imports launching and below; neither torch nor IPython."""
