# SPDX-License-Identifier: Apache-2.0
"""The rank's side: a Jupyter kernel with additional request types. Imports `protocol` and below."""
