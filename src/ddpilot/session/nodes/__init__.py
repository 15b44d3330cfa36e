# SPDX-License-Identifier: Apache-2.0
"""The parent's side of ranks on other machines: one connection per node, over ssh or TLS. Imports `protocol`."""
