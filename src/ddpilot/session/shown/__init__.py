# SPDX-License-Identifier: Apache-2.0
"""What ranks publish, made fit to show: lines labelled and collapsed, rich objects compared across ranks."""
