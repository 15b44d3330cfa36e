# SPDX-License-Identifier: Apache-2.0
"""Rules about parameters that diverge: since when, and why. Imports `rules.rule`."""
