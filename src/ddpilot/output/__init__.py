# SPDX-License-Identifier: Apache-2.0
"""Show ranks' output, equal displays once. Imports `errors`, `findings`; only `notebook_view` imports IPython."""
