# SPDX-License-Identifier: Apache-2.0
"""The rank's side of a session: a Jupyter kernel with additional request types."""
