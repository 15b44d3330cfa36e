# SPDX-License-Identifier: Apache-2.0
"""Findings: results of checks, recorded first and rendered later as text or HTML. Imports `errors`."""
