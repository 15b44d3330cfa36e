# SPDX-License-Identifier: Apache-2.0
"""Try what could make a script faster, on the script itself. Free of torch; runs are made by the caller."""
