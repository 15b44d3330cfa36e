# SPDX-License-Identifier: Apache-2.0
"""Try on a script what could make it faster. Imports the profile's `result` and `findings`; not torch."""
