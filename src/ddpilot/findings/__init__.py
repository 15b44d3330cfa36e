# SPDX-License-Identifier: Apache-2.0
"""What a check found, recorded first and rendered later: as text, HTML or JSON."""
