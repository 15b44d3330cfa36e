# SPDX-License-Identifier: Apache-2.0
"""Record in each rank what the updates of a program compute, and change what is to be ruled out. Torch in ranks."""
