# SPDX-License-Identifier: Apache-2.0
"""Turn what `matching` finds into findings: all text for users is here.

Imports `matching`, `job`, `source`, `findings` and what is below them.
"""
