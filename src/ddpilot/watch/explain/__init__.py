# SPDX-License-Identifier: Apache-2.0
"""Turn the results of `matching` into findings; all text for users is here. Imports `matching` and `source`."""
