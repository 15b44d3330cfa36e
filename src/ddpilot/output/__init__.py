# SPDX-License-Identifier: Apache-2.0
"""Show ranks' output in a terminal or notebook. Imports `errors`, `findings`; only `notebook_view` imports IPython."""
