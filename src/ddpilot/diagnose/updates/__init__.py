# SPDX-License-Identifier: Apache-2.0
"""Record what the updates of a rank compute, and change what is to be ruled out. Imports torch and guard's probes."""
