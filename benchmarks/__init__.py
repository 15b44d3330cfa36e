# SPDX-License-Identifier: Apache-2.0
"""One script per promise that has a number; `make bench` runs them all and prints one table."""
