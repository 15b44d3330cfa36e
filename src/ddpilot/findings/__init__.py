# SPDX-License-Identifier: Apache-2.0
"""Findings: results of checks, recorded first, sorted and rendered later as text, HTML or JSON. Imports `errors`."""
