# SPDX-License-Identifier: Apache-2.0
"""What `make dist` and `make check` run besides tests: checks of the archives, and of the prose."""
